"""Torch ops of the MoE layer: routing, dispatch, all-to-all, experts, combine."""
