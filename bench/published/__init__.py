"""Measurements that others published, beside what `lancet plan` predicts for them.

rows/       one TOML file for each source: configuration, what is assumed, measured values
rows        reads them
layers      one MoE layer alone, as Megatron-LM's performance test measures it
predict     the prediction and its error for each row
fit         the constants that are fitted, on Megatron-LM's rows only
"""
