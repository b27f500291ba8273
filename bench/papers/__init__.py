"""The evaluations of three papers by simulation, beside the papers' numbers: `python -m bench.papers`.

`lancet`, `hidup` and `primepar` each say what is simulated, what the paper claims, and which tables and
pictures show it; `report` makes text, JSON and pictures of them.
"""
