"""Orders of a Program.

Read `ordering` (with Lancet's Algorithm 1), then `list_schedule`; `best_order` tries all methods, and
improves the best by local search. `megatron` and `graph_trainer` are baselines.
"""
