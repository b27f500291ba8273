"""The evaluations of three papers by simulation, beside the papers' numbers: `python -m bench.papers`.

`lancet`, `hidup` and `primepar` have the simulations, tables and charts of a paper; `report` prints them as
text, JSON and pictures, beside the paper's claims (claims.json).
"""
