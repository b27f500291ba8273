"""What a call on a rank refuses, as the text that its test compares."""

from collections.abc import Callable

from lancet_kernels.errors import UserError


def refusal(call: Callable[[], object], kind: type[Exception] = UserError) -> str:
    """The message of the error of this kind that the call raises, or "nothing refused"."""
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing refused"
