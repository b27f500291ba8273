"""Time and memory of an order.

Read `simulate` for time and its lower bound, then `peak_memory`; `timeline` draws and summarizes it.
"""
