"""PrimePar: the search for partitions of linear layers.

Read `partition_costs`, then `segments`.
"""
