"""Orders of a Program.

Read `weight_gradients` (Lancet's Algorithm 1), then `list_schedule`; `best_order` tries all methods, and
`local_search` improves the best. `megatron` is a baseline.
"""
