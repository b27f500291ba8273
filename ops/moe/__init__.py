"""The ops of an MoE layer.

In the order of the forward: `router` (with `gate` and `gates`), `dispatch`, `expert_ops`, the combine in
`dispatch`. `fused_experts` is all from dispatch to combine as fused launches, `eager_experts` as one autograd
function.
"""
