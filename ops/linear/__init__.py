"""PrimePar's linear layer on the ranks of a partition.

Read `tiles`, then `square_linear`.
"""
