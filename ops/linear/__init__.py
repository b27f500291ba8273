"""PrimePar's linear layer on the ranks of a partition.

The op is in `square_linear`.
"""
