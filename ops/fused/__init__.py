"""The experts of a layer in fused kernels.

Read `fused_experts`, then `fused_graph`, its form in captured graphs.
"""
