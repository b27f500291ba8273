"""The exceptions of this library; each message is one clear line.

The message of a `UserError` says what was got, what was expected, and what to do. It is a ValueError, so that
code that does not know this library can catch it, too.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial


class UserError(ValueError):
    """A value that the user gave is wrong. The message is one line: got, expected, what to do."""

    def __init__(self, what: str, *, got: object, expected: object, do: str):
        self.what, self.got, self.expected, self.do = what, got, expected, do
        super().__init__(f"{what}: got {got}, expected {expected}; {do}")

    def __reduce__(self) -> tuple[Callable[..., "UserError"], tuple[str]]:
        # Ranks send each other their errors; what was got or expected can be anything.
        texts = {"got": str(self.got), "expected": str(self.expected), "do": self.do}
        return partial(UserError, **texts), (self.what,)


def class_name(module: object) -> str:
    """The name of a module's class as the user wrote it.

    FSDP and `convert` derive classes from it: `FSDPMixtralExperts`, `LancetMixtralExperts`.
    """
    own = type(module)
    while len(own.__bases__) == 2:
        base = own.__bases__[1]
        if own.__name__ not in (f"FSDP{base.__name__}", f"Lancet{base.__name__}"):
            break
        own = base
    return own.__name__


def check_name(what: str, value: object, names: Collection[str], do: str = "check the name") -> None:
    """Raise UserError unless `value` is one of the names."""
    if value not in names:
        raise UserError(what, got=repr(value), expected=f"one of {', '.join(names)}", do=do)


def check_type(what: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise UserError unless `value` is of one of the types. Args: expected: them, in words."""
    if not isinstance(value, kinds):
        raise UserError(what, got=type(value).__name__, expected=expected, do="see its docstring")


class CommunicationError(RuntimeError):
    """A collective failed or ran out of time. The message names rank, operation and whom it waited for.

    missing: ranks that did not take part, where this rank knows them. timed_out: a wait ran out of time;
    otherwise a connection was lost. described: the message already names the op and the layer.
    """

    def __init__(
        self, message: str, *, missing: Sequence[int] = (), timed_out: bool = False, described: bool = False
    ):
        self.missing, self.timed_out, self.described = tuple(missing), timed_out, described
        super().__init__(message)


class RankFailed(RuntimeError):
    """A rank died or raised, and the job was ended. The message is one line: the rank and its error."""

    def __init__(self, rank: int, what: str, *, traceback_file: str | None = None):
        self.rank, self.traceback_file = rank, traceback_file
        super().__init__(
            f"rank {rank} {what}" + (f" (traceback in {traceback_file})" if traceback_file else "")
        )
