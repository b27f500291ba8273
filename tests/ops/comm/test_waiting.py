"""What a collective that fails says, with a board of the ranks and without one."""

import struct
import time

import pytest
import torch.distributed as dist

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.ops.comm import waiting as module
from lancet_kernels.ops.comm.waiting import BOARD_FILE, Board, blames, join_board, waiting

TIMED_OUT = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv\nframe")
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """This process as rank 0 of three that share a board. -> the boards of the three."""
    Board.create(tmp_path / "board", 3)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), (BOARD_FILE, str(tmp_path / "board"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "_board", None)
    boards = [join_board(), *(Board(tmp_path / "board", rank) for rank in (1, 2))]
    for board in boards:
        board.sign()
    return boards


def failure(error: Exception, op: str = "all_to_all", layer: str = "blocks.3") -> CommunicationError:
    with pytest.raises(CommunicationError) as caught, waiting(op, None, layer):
        raise error
    assert "\n" not in str(caught.value)
    return caught.value


def age(board: Board, seconds: float) -> None:
    """Put the last sign of life of a board's rank into the past."""
    then = time.monotonic() - seconds
    struct.pack_into("=d", board._memory, board.rank * Board._ROW, then)


def test_the_rank_that_shows_no_sign_of_life_is_named(ranks):
    ranks[2].enter(b"exchange_counts of blocks.1")
    for _ in range(2):
        ranks[2].enter(b"all_to_all of blocks.3")
    age(ranks[2], 9)
    error = failure(TIMED_OUT)
    # Rank 1 has entered less, but it runs: it waits for rank 2 as well.
    assert error.missing == (2,)
    assert str(error) == (
        "rank 0 waited 0.0 s in all_to_all of blocks.3 for rank(s) 2; rank 2 last entered all_to_all of "
        "blocks.3 0.0 s ago and has shown no sign of life for 9.0 s"
    )


@pytest.mark.parametrize("written", [(b"", 0.0, 0), (b"all_to_all", 0.0, 0), (b"all_to_all", 5.0, 0)])
def test_a_rank_stopped_while_it_writes_is_named_with_the_entry_before(ranks, written):
    for where in (b"exchange_counts of blocks.1", b"all_to_all of blocks.1", b"exchange_counts of blocks.3"):
        ranks[2].enter(where)
    before = ranks[0].entry(2)
    Board._ENTRY.pack_into(ranks[2]._memory, ranks[2]._places(2)[0], *written)
    assert ranks[0].entry(2) == before
    assert (before.number, before.where) == (3, "exchange_counts of blocks.3")


def test_of_ranks_that_run_the_one_that_is_behind_is_named(ranks):
    ranks[2].enter(b"all_to_all of blocks.3")
    error = failure(TIMED_OUT)
    assert error.missing == (1,)
    assert str(error).endswith("for rank(s) 1; rank 1 has entered no collective yet and still runs")


def test_a_rank_that_has_not_started_is_named(ranks, tmp_path):
    struct.pack_into("=d", ranks[1]._memory, Board._ROW, 0.0)
    assert str(failure(TIMED_OUT)).endswith("for rank(s) 1; rank 1 has not started yet")


def test_if_the_board_tells_nothing_all_peers_are_named(ranks):
    for board in ranks[1:]:
        board.enter(b"all_to_all")
    error = failure(TIMED_OUT, layer="")
    assert error.missing == ()
    assert str(error) == "rank 0 waited 0.0 s in all_to_all for rank(s) 1, 2"


def test_without_a_board_op_layer_and_peers_are_named(monkeypatch):
    monkeypatch.setattr(module, "_board", None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = failure(TIMED_OUT)
    assert str(error) == "rank 1 waited 0.0 s in all_to_all of blocks.3 for rank(s) 0"
    assert error.missing == (0,)


def test_a_lost_connection_is_no_timeout(ranks):
    error = failure(CLOSED)
    assert not error.timed_out
    assert str(error) == (
        "rank 0 lost its connection to one of rank(s) 1, 2 in all_to_all of blocks.3: "
        "Connection closed by peer [127.0.0.1]:1"
    )


def test_what_a_kernel_says_of_a_wait_is_kept(ranks):
    reason = CommunicationError("layer1: PE 0 waited for PE 2", missing=(2,), timed_out=True)
    for board in ranks[1:]:
        board.enter(b"fused_experts")
    error = failure(reason, "fused_experts")
    assert error.missing == (2,)
    assert str(error).endswith("[layer1: PE 0 waited for PE 2]")


@pytest.mark.parametrize(
    "error", [UserError("top_k", got=1, expected=2, do="x"), RuntimeError("shapes differ")]
)
def test_errors_that_are_not_the_peers_pass_as_they_are(ranks, error):
    with pytest.raises(type(error)) as caught, waiting("all_to_all"):
        raise error
    assert caught.value is error


def test_a_failure_is_described_once(ranks):
    with pytest.raises(CommunicationError) as caught, waiting("outer"), waiting("inner"):
        raise TIMED_OUT
    assert "in inner for" in str(caught.value)


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (ValueError("timed out"), "self"),
        (RuntimeError("shape mismatch"), "self"),
        (CLOSED, "peer"),
        (TIMED_OUT, "timeout"),
        (RuntimeError("Application timeout caused pair closure"), "timeout"),
        (dist.DistNetworkError("Connection reset"), "peer"),
        (dist.DistNetworkError("port: 29500, code: -98, name: EADDRINUSE"), "self"),
        (CommunicationError("all_to_all with rank 3"), "peer"),
        (CommunicationError("all_to_all with rank 3", timed_out=True), "timeout"),
        (chained(ValueError("step failed"), ConnectionResetError()), "peer"),
        (chained(ValueError("bad"), KeyError("x")), "self"),
        (TimeoutError(), "timeout"),
    ],
)
def test_what_an_error_blames(error, blamed):
    assert blames(error) == blamed
