"""What a call on a rank refuses, as the text that its test compares."""

from collections.abc import Callable

from lancet_kernels.errors import UserError


def refusal(call: Callable[[], object], kind: type[Exception] = UserError) -> str:
    """The message, of one line, of the error of this kind that the call raises, or "nothing refused"."""
    message = "nothing refused"
    try:
        call()
    except kind as error:
        message = str(error)
    assert "\n" not in message
    return message
