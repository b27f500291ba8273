"""What an order costs.

Read `simulate` for time and its lower bound, then `peak_memory`; `timeline` draws it and says it.
"""
