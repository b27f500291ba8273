"""What a user can do wrong, as exceptions with one clear line each.

Every message says what was got, what was expected, and what to do. `UserError` is a ValueError, so
callers who know nothing of this library still catch it the usual way.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """A value that the user gave is wrong. The message is one line: got, expected, what to do."""

    def __init__(self, what: str, *, got: object, expected: object, do: str):
        self.got, self.expected, self.do = got, expected, do
        super().__init__(f"{what}: got {got}, expected {expected}; {do}")


class CommunicationError(RuntimeError):
    """A collective failed or ran out of time. The message names rank, operation and whom it waited for.

    missing: the ranks that did not come, as far as this rank can tell. timed_out: a wait ran out of time;
    else a connection was lost. described: the message already says in which op of which layer.
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
