"""Tasks of fused launches: the device finds those of the rules, and none waits for one behind it.

What this alone finds: a task that waits for a later one of its PE, to which a single program never comes.
That rows are released in time, and counts are those of the epoch, depends on earlier launches only:
`test_protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.kernels.protocol import Constants, PassState, Pointers, Sizes, schedule, steps, tasks
from lancet_kernels.kernels.protocol.device import TOO_MANY_ROWS
from lancet_kernels.kernels.protocol.schedule import schedule_kernel
from lancet_kernels.kernels.protocol.steps import num_put_tasks, put_task
from lancet_kernels.kernels.protocol.tasks import gemm_task, num_gemm_tasks
from tests.examples import examples

PUT, TILE_IN, TILE_OUT, WGRAD, DENSE = (
    getattr(tasks, name).value for name in "PUT TILE_IN TILE_OUT WGRAD DENSE".split()
)
GROUP, PARTS = tasks.GROUP.value, steps.PARTS.value
Task = tuple[int, ...]
Key = tuple[int, int]  # local expert, tile of the expert


@dataclass(frozen=True)
class LaunchShape:
    """What a launch has, apart from puts and tiles, whose numbers the counts decide.

    Attributes: tiles_in, tiles_out: column tiles of the first and second GEMM. wgrad: weight gradients.
        programs: size of the grid.
    """

    tiles_in: int = 1
    tiles_out: int = 1
    wgrad: bool = False
    programs: int = 1

    @property
    def lag(self) -> int:
        """By how many tiles the second GEMM is behind the first."""
        return GROUP * -(-self.programs // (GROUP * self.tiles_in))


@dataclass(frozen=True)
class Routed:
    """Counts of all PEs, and what follows from them.

    Attributes:
        counts: [W][E]. local: experts on each PE. block_m: rows of a tile.
    """

    counts: tuple[tuple[int, ...], ...]
    local: int
    block_m: int

    @property
    def world(self) -> int:
        return len(self.counts)

    def tiles(self, rank: int) -> list[Key]:
        """The tiles of a PE, in order."""
        found = []
        for local in range(self.local):
            rows = sum(count[rank * self.local + local] for count in self.counts)
            found += [(local, m) for m in range(-(-rows // self.block_m))]
        return found

    def touched(self, source: int, expert: int) -> set[int]:
        """The tiles of an expert in which rows of a source lie."""
        before = sum(count[expert] for count in self.counts[:source])
        return {i // self.block_m for i in range(before, before + self.counts[source][expert])}

    def puts(self, rank: int) -> list[tuple[Key, Task]]:
        """(key, task) in order: by local expert and tile, to rank + 1 first and to the PE itself last."""
        found = []
        for expert in range(self.world * self.local):
            peer, local = divmod(expert, self.local)
            step = (peer - rank - 1) % self.world
            found += [
                ((local, m), step, (PUT, expert, m, part))
                for m in self.touched(rank, expert)
                for part in range(PARTS)
            ]
        return [(key, task) for key, _, task in sorted(found)]


def task_list(
    routed: Routed, rank: int, shape: LaunchShape, dense: list = (), wgrads: list = ()
) -> list[Task]:
    """All tasks of a launch in the order of their numbers.

    dense: (row tiles, column tiles) of each independent GEMM; wgrads: tasks of the weight gradients.
    """
    tiles = routed.tiles(rank)
    listed = [task for _, task in routed.puts(rank)]
    for problem, (rows, columns) in enumerate(dense):
        listed += [(DENSE, problem, m, n) for m, n in in_groups(rows, columns)]
    ins, outs = (
        _of_tiles(kind, tiles, n) for kind, n in ((TILE_IN, shape.tiles_in), (TILE_OUT, shape.tiles_out))
    )
    lag = min(shape.lag, len(tiles))
    listed += ins[: lag * shape.tiles_in]
    for first in range(0, len(tiles), GROUP):
        turn = slice((lag + first) * shape.tiles_in, (lag + first + GROUP) * shape.tiles_in)
        listed += ins[turn] + outs[first * shape.tiles_out : (first + GROUP) * shape.tiles_out]
    return listed + list(wgrads)


def in_groups(rows: int, columns: int) -> list[tuple[int, int]]:
    """The tiles of a matrix: GROUP rows at a time, each group column by column."""
    groups = [range(rows)[first : first + GROUP] for first in range(0, rows, GROUP)]
    return [(m, n) for group in groups for n in range(columns) for m in group]


def _of_tiles(kind: int, tiles: list[Key], columns: int) -> list[Task]:
    """All tasks of one GEMM: the tiles of each expert in groups."""
    listed = []
    for local in sorted({local for local, _ in tiles}):
        first = tiles.index((local, 0))
        rows = sum(key[0] == local for key in tiles)
        listed += [(kind, first + m, n) for m, n in in_groups(rows, columns)]
    return listed


# Which of which, index, m, n a kind has.
FIELDS = {PUT: (1, 2, 3), TILE_IN: (1, 3), TILE_OUT: (1, 3), WGRAD: (0, 1, 2, 3), DENSE: (1, 2, 3)}


@st.composite
def routings(draw: st.DrawFn, most_experts: int = 4) -> Routed:
    """1 to 4 PEs; even, skewed, with empty experts, or all rows to one expert."""
    world, local = draw(st.integers(1, 4)), draw(st.integers(1, most_experts))
    most = draw(st.sampled_from([1, 4, 14]))
    rows = st.lists(st.integers(0, most), min_size=world * local, max_size=world * local)
    counts = [draw(rows) for _ in range(world)]
    if draw(st.booleans()):
        hot = draw(st.integers(0, world * local - 1))
        counts = [[sum(count) if e == hot else 0 for e in range(len(count))] for count in counts]
    return Routed(tuple(map(tuple, counts)), local, draw(st.sampled_from([1, 4, 16])))


# ---- what the device finds

BN, BN_IN = 16, 8


@triton.jit
def offsets_kernel(
    counts_ptr, table_ptr, report_ptr, rank, W, L, BM: tl.constexpr, BE: tl.constexpr, BW: tl.constexpr
):
    schedule._offsets(counts_ptr, table_ptr, report_ptr, rank, W, L, BM, BE, BW)


@triton.jit
def _list_tasks(out_ptr, lag, ptrs, sizes, const):
    num_puts, num_tiles = num_put_tasks(ptrs), tl.load(ptrs.of_pass.table + schedule.NUM_TILES)
    num_gemms = num_gemm_tasks(num_tiles, sizes, const)
    for i in range(num_puts):
        expert, m, part = put_task(num_puts * 0 + i, ptrs, sizes)
        tl.store(out_ptr + 5 * i, 0)
        tl.store(out_ptr + 5 * i + 2, expert)
        tl.store(out_ptr + 5 * i + 3, m)
        tl.store(out_ptr + 5 * i + 4, part)
    out_ptr += 5 * num_puts
    i = num_gemms * 0
    while i < num_gemms:
        task = gemm_task(i, num_tiles, lag, ptrs, sizes, const)
        tl.store(out_ptr + 5 * i, task.kind)
        tl.store(out_ptr + 5 * i + 1, task.which)
        tl.store(out_ptr + 5 * i + 2, task.index)
        tl.store(out_ptr + 5 * i + 3, task.m)
        tl.store(out_ptr + 5 * i + 4, task.n)
        i += 1


@triton.jit
def list_tasks_kernel(
    of_pass, problems_ptr, out_ptr, num_problems, dense_tiles, lag, rank, W, L, D, F, H, tiles, chunks,
    HAS_WGRAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BN_IN: tl.constexpr,
):  # fmt: skip
    _list_tasks(
        out_ptr, lag, Pointers(of_pass, None, None, None, None, None, None, problems_ptr),
        Sizes(rank, W, L, D, F, H, 0, tiles, chunks, 0, num_problems, dense_tiles, 0),
        Constants(HAS_WGRAD, "gelu", False, False, BM, BN, BN_IN, 16, 1, 1, 1),
    )  # fmt: skip


def device_table(
    routed: Routed, rank: int, room: tuple[int, ...] | None = None, numbered: bool = True
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """-> the table, the report, and room for tiles and puts. room: of each PE; base is ten times the PE."""
    world, local, block_m = routed.world, routed.local, routed.block_m
    experts, counts = world * local, torch.tensor(routed.counts, dtype=torch.int32)
    receive = int(counts.sum())
    rooms = [(10 * w, receive if room is None else room[w]) for w in range(world)]
    said = torch.cat([counts, torch.tensor(rooms, dtype=torch.int32)], 1)
    tiles = schedule.most_tiles(receive, local, block_m)
    chunks = schedule.most_chunks(int(counts.sum(1).max()), experts, block_m)
    size = schedule.table_words(world, experts, tiles, chunks)
    guarded = torch.full((size + 32,), -7, dtype=torch.int32)
    table = guarded[16:-16]
    table.zero_()
    report = torch.zeros(8, dtype=torch.int64)
    blocks = {"BM": block_m, "BE": triton.next_power_of_2(experts), "BW": triton.next_power_of_2(world)}
    offsets_kernel[(1,)](said, table, report, rank, world, local, **blocks)
    if numbered:
        schedule_kernel[(local,)](table, rank, world, local, tiles, chunks, **blocks, BT=4)
    assert (guarded[:16] == -7).all()
    assert (guarded[-16:] == -7).all()
    return table, report, tiles, chunks


def device_list(
    routed: Routed, rank: int, shape: LaunchShape, dense: list, sizes: tuple[int, int, int]
) -> tuple[list[Task], list[Task]]:
    """-> every task, by its number, and those of the rules. sizes: D, F, H; tiles are `block_m` by BN."""
    table, _, tiles, chunks = device_table(routed, rank)
    block_m, problems, first = routed.block_m, [], 0
    for rows, columns in dense:
        problems.append([0, 0, 0, rows * block_m, columns * BN, 8, first, 0])
        first += rows * columns
    expected = task_list(routed, rank, shape, dense, wgrad_tasks(routed, sizes) if shape.wgrad else [])
    out = torch.zeros(len(expected) + 1, 5, dtype=torch.int32)
    list_tasks_kernel[(1,)](
        PassState(None, table, None, None, None, None), torch.tensor(problems) if problems else None, out,
        len(dense), first, shape.lag, rank, routed.world, routed.local, *sizes, tiles, chunks,
        HAS_WGRAD=shape.wgrad, BM=block_m, BN=BN, BN_IN=BN_IN,
    )  # fmt: skip
    assert not out[-1].any()
    found = [(kind, *(fields[i] for i in FIELDS[kind])) for kind, *fields in out[:-1].tolist()]
    return found, expected


def wgrad_tasks(routed: Routed, sizes: tuple[int, int, int]) -> list[Task]:
    width, hidden, wide = sizes
    grids = [(hidden, width), (width, wide)]
    return [
        (WGRAD, which, local, m, n)
        for which, (rows, columns) in enumerate(grids)
        for local in range(routed.local)
        for m, n in in_groups(-(-rows // routed.block_m), -(-columns // BN))
    ]


@pytest.mark.long
@given(routed=routings(), data=st.data())
@examples(6)
def test_the_device_finds_the_tasks_of_the_rules(routed: Routed, data: st.DataObject) -> None:
    dense = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), max_size=2))
    width, hidden = 20, 18
    shape = LaunchShape(
        -(-hidden // BN_IN), -(-width // BN), data.draw(st.booleans()), programs=data.draw(st.integers(1, 6))
    )
    for rank in range(routed.world):
        found, expected = device_list(routed, rank, shape, dense, (width, hidden, 2 * hidden))
        assert found == expected


EXAMPLE = Routed(((2, 5, 0, 1, 0, 3), (3, 1, 0, 4, 2, 0)), 3, 4)


def test_the_device_finds_the_tasks_of_the_example() -> None:
    for rank in range(2):
        found, expected = device_list(EXAMPLE, rank, LaunchShape(2, 1, True, 3), [(1, 2)], (16, 10, 20))
        assert found == expected
    puts = [task[1:3] for task in expected[: 6 * PARTS : PARTS]]
    assert puts == [(0, 0), (3, 0), (0, 1), (3, 1), (4, 0), (1, 1)]


def test_offsets_of_more_counts_than_are_read_at_once() -> None:
    counts = torch.randint(0, 3, (3, 3 * 700), generator=torch.Generator().manual_seed(0))
    table, *_ = device_table(Routed(tuple(map(tuple, counts.tolist())), 700, 16), 1, numbered=False)
    found = table[8 : 8 + 3 * counts.numel()].view(3, *counts.shape)
    assert torch.equal(found[0], counts.int())
    assert torch.equal(found[1], (counts.cumsum(0) - counts).int())
    assert torch.equal(found[2], (counts.cumsum(1) - counts).int())


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_do_not_fit_make_the_table_void_on_every_pe(rank: int) -> None:
    table, report, *_ = device_table(EXAMPLE, rank, room=(10, 20))
    assert table[:3].tolist() == [1, 0, 0]
    assert report[:7].tolist() == [1, rank, 0, TOO_MANY_ROWS.value, 0, 11, 10]
    assert device_table(EXAMPLE, rank, room=(11, 8))[1][:7].tolist()[2:] == [1, TOO_MANY_ROWS.value, 0, 10, 8]
    assert not device_table(EXAMPLE, rank, room=(11, 10))[1].any()


@triton.jit
def largest_gap_kernel(occupied_ptr, out_ptr, A, passes, BP: tl.constexpr):
    base, room = schedule._largest_gap(occupied_ptr, A, passes, BP)
    tl.store(out_ptr, base)
    tl.store(out_ptr + 1, room)


@given(data=st.data())
@examples(20)
def test_passes_take_the_largest_gap(data: st.DataObject) -> None:
    """Rows of passes that begin and end in any order: never twice occupied, and all room in a row."""
    size, passes = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 5))
    occupied, out = torch.zeros(passes, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for _ in range(12):
        free = [place for place in range(passes) if not occupied[place].any()]
        held = [place for place in range(passes) if occupied[place].any()]
        if held and (not free or data.draw(st.booleans())):
            occupied[data.draw(st.sampled_from(held))] = 0
            continue
        largest_gap_kernel[(1,)](occupied, out, size, passes, BP=triton.next_power_of_2(passes))
        rows = "".join("x" if any(b <= i < e for b, e in occupied.tolist()) else "." for i in range(size))
        longest = max(map(len, rows.split("x")))
        base, room = out.tolist()
        assert room == longest
        assert rows[base : base + room] == "." * room
        if room:
            occupied[free[0]] = torch.tensor([base, base + data.draw(st.integers(1, room))])


# ---- one program finishes


def too_early(routed: Routed, rank: int, shape: LaunchShape) -> list[Task]:
    """Tasks that stand before one that they wait for (`protocol/steps.py`); puts wait for none."""
    tiles = routed.tiles(rank)
    wgrads = [(WGRAD, which, local, 0, 0) for which in range(2) for local in range(routed.local)]
    listed = task_list(routed, rank, shape, wgrads=wgrads if shape.wgrad else [])
    at = {task: i for i, task in enumerate(listed)}
    assert len(at) == len(listed)
    puts = [at[task] for _, task in routed.puts(rank)]
    found = [task for task in listed if task[0] != PUT and at[task] < max(puts, default=-1)]
    for task in listed:
        needed = [task[1]] if task[0] == TILE_OUT else []
        if task[0] == WGRAD:
            needed = [tile for tile, (local, _) in enumerate(tiles) if local == task[2]]
        if any(at[TILE_IN, tile, n] > at[task] for tile in needed for n in range(shape.tiles_in)):
            found.append(task)
    return found


@given(routed=routings(), sizes=st.tuples(*[st.integers(1, 3)] * 2), programs=st.integers(1, 6))
@examples(200)
def test_every_wait_is_for_an_earlier_task(routed: Routed, sizes: tuple[int, int], programs: int) -> None:
    """Or for rows, which come: puts stand first. So one program per PE comes to the end."""
    for rank in range(routed.world):
        assert not too_early(routed, rank, LaunchShape(*sizes, wgrad=True, programs=programs))


def test_a_second_gemm_less_than_a_group_behind_waits_for_later_tasks() -> None:
    class Hasty(LaunchShape):
        lag = 0

    routed = Routed(((6, 18),), 2, 2)
    assert not too_early(routed, 0, LaunchShape(tiles_in=2))
    assert too_early(routed, 0, Hasty(tiles_in=2)) == [(TILE_OUT, tile, 0) for tile in (5, 6, 7)]
