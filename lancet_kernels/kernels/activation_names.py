"""Which activations do experts have? Their names; Triton is not needed to know them."""

from lancet_kernels.errors import UserError

ACTIVATIONS = ("gelu", "silu", "swiglu")


def check_activation(kind: str, what: str = "activation", known: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise UserError unless `kind` is one of `known`."""
    if kind not in known:
        raise UserError(what, got=repr(kind), expected=f"one of {', '.join(known)}", do="check the name")
