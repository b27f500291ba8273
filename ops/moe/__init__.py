"""The ops of an MoE layer.

In the order of the forward: `gate` (with `gates/`), `dispatch`, `grouped_gemm`, `expert_activation`, the
combine in `dispatch`, `losses`; `fused_experts` is the part between dispatch and combine as fused launches.
"""
