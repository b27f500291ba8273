"""What a call on a rank refuses, as the text that its test compares."""

from collections.abc import Callable

from lancet_kernels.errors import UserError


def refusal(call: Callable[[], object]) -> str:
    """The message of the UserError that the call raises, or "nothing refused"."""
    try:
        call()
    except UserError as error:
        return str(error)
    return "nothing refused"
