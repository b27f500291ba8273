"""The names of the experts' activations; this file does not need Triton."""

from lancet_kernels.errors import UserError

ACTIVATIONS = ("gelu", "silu", "swiglu")
"""The activations that the kernels compute."""
ALL_ACTIVATIONS = (*ACTIVATIONS, "clamped-swiglu")
"""The activations of layers with backend "torch"; "clamped-swiglu" (GPT-OSS) is computed by plain torch
ops."""
GATED = ("swiglu", "clamped-swiglu")
"""The activations whose input is [gate | up], twice as wide as the output."""


def check_activation(kind: str, what: str = "activation", supported: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise UserError unless `kind` is one of `supported`."""
    if kind not in supported:
        do = 'use backend="torch"' if kind in ALL_ACTIVATIONS else "check the name"
        raise UserError(what, got=repr(kind), expected=f"one of {', '.join(supported)}", do=do)
