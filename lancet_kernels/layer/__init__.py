"""`MoELayer`, what a model's layers have in common, and gradients over ranks.

Read `moe_layer` first, then `model_layers`; `gradients` and `data_parallel` for training on several ranks.
"""
