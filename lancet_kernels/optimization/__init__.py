"""`optimize`: capture, plan, run.

Read `optimize` and `captured_step`, then `optimized_module` with `guards` and `planned_shapes`.
"""
