"""Measurements that others published, beside what `lancet plan` predicts for them.

measurements/  one TOML file for each source: configuration, what is assumed, measured values
configs/       config.json of the models
rows           reads them; the prediction and its error for each row
"""
