"""MoE layers as fused launches.

Read `fused_layers`, which finds them in a graph, then `fused`, which chooses and replaces them.
"""
