"""Which activations do experts have? Their names; Triton is not needed to know them."""

from lancet_kernels.errors import UserError

ACTIVATIONS = ("gelu", "silu", "swiglu")
"""What the kernels compute."""
ALL_ACTIVATIONS = (*ACTIVATIONS, "clamped-swiglu")
"""What layers with backend "torch" compute: "clamped-swiglu" (GPT-OSS) in plain torch ops."""
GATED = ("swiglu", "clamped-swiglu")
"""Those whose input is [gate | up], twice as wide as their output."""


def check_activation(kind: str, what: str = "activation", known: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise UserError unless `kind` is one of `known`."""
    if kind not in known:
        do = 'use backend="torch"' if kind in ALL_ACTIVATIONS else "check the name"
        raise UserError(what, got=repr(kind), expected=f"one of {', '.join(known)}", do=do)
