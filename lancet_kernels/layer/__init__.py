"""`MoELayer`, and what a model's layers have in common.

Read `moe_layer` first, then `model_layers`.
"""
