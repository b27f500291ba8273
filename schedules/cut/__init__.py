"""Lancet, section 5: which ranges of the forward are cut into parts.

Read `ranges`, then the pipeline and the dynamic program in `partition_range`; `duplex` cuts the
batch in two that do not wait for each other.
"""
