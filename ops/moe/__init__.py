"""The ops of an MoE layer.

In the order of the forward: `router` (with `gates/`), `dispatch`, `grouped_gemm`, `expert_activation`, the
combine in `dispatch`; `fused_experts` is the part between dispatch and combine as fused launches.
"""
