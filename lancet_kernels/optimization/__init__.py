"""`optimize`: capture, plan, run.

Read `optimize` and `step`, then `optimized_module` with `guards`.
"""
