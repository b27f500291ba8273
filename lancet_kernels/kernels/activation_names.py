"""The names of the experts' activations; this file does not need Triton."""

from lancet_kernels.errors import UserError

ACTIVATIONS = ("gelu", "silu", "swiglu")
"""The activations that the kernels compute."""
INTERLEAVED = "interleaved-clamped-swiglu"
"""As "clamped-swiglu", with gate and up in alternate columns."""
CLAMPED = ("clamped-swiglu", INTERLEAVED)
"""The activations of GPT-OSS."""
ALL_ACTIVATIONS = (*ACTIVATIONS, *CLAMPED)
"""The activations of layers with backend "torch"; those of GPT-OSS are computed by plain torch ops."""
GATED = ("swiglu", *CLAMPED)
"""The activations whose input holds gate and up, so is twice as wide as the output."""


def check_activation(kind: str, what: str = "activation", supported: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise UserError unless `kind` is one of `supported`."""
    if kind not in supported:
        is_other = kind in ALL_ACTIVATIONS or "(" in kind  # or an expression of `ops.moe.expert_activation`
        do = 'use backend="torch"' if is_other else "check the name"
        raise UserError(what, got=repr(kind), expected=f"one of {', '.join(supported)}", do=do)
