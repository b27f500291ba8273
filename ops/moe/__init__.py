"""The ops of an MoE layer.

In the order of the forward: `router_logits`, `gate` (with `gates/`), `send_rows`, `dispatch`, `grouped_gemm`,
`expert_activation`, `combine`, `losses`.
"""
