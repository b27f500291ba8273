"""Measurements that others published, beside what `lancet plan` predicts for them.

measurements/  one TOML file for each source: configuration, what is assumed, measured values
configs/       config.json of the models
rows           reads them
layers         one MoE layer alone, as Megatron-LM's performance test measures it
predict        the prediction and its error for each row
fit            the constants that are fitted, on Megatron-LM's rows only
trace          DeepSeek's public trace beside the clock, and two constants from it
scale          two models over 8 to 4,096 GPUs, a page of the documentation
"""
