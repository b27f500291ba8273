"""Published measurements, beside the predictions of `lancet plan`.

measurements/  one TOML file for each source: configuration, assumptions, measured values
configs/       config.json of the models
rows           reads them; the prediction and its error for each row
"""
