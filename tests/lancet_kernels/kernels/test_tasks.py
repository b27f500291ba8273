"""Task lists finish whatever the shape, even with one program on every PE; lists that do not are caught.

The lists are the builder's. What a task waits for is said twice: by `tasks.needs`, and here by `waits`, as
the kernel does it (overlap_tasks.py), with any number of chunks filled. What a task reads without waiting
for it must be there as well, because it comes from an earlier launch (`reads`).

Facts only ever become true, and a task that may run may also run later. So with one program per PE all orders
in which the PEs take turns end in the same place, and one walk decides for all of them. That a bank is
released in time depends on earlier launches only: `test_protocol.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.kernels import tasks
from lancet_kernels.kernels.tasks import (
    DENSE,
    DWEIGHT,
    PUT,
    REDUCE,
    TILE_IN,
    TILE_OUT,
    WGRAD,
    Fact,
    LaunchShape,
    Task,
    build_tasks,
)
from tests.examples import examples

NUMBERS = {PUT: 2, TILE_IN: 4, TILE_OUT: 4, WGRAD: 4, DENSE: 3, REDUCE: 1, DWEIGHT: 1}
NAMES = {getattr(tasks, name): name for name in "PUT TILE_IN TILE_OUT WGRAD DENSE REDUCE DWEIGHT".split()}
Lists = list[list[list[Task]]]  # [rank][launch]


@dataclass(frozen=True)
class Pass:
    """One use of an exchange: the launches of every PE, and how many chunks of (source, expert) have rows."""

    shapes: list[list[LaunchShape]]  # [rank][launch]
    filled: list[list[int]]  # [source][expert]

    def lists(self) -> Lists:
        return [[task_list(shape) for shape in launches] for launches in self.shapes]


def task_list(shape: LaunchShape) -> list[Task]:
    return [(int(row[0]), *map(int, row[1 : 1 + NUMBERS[int(row[0])]])) for row in build_tasks(shape)]


def named(task: Task) -> str:
    return f"{NAMES[task[0]]}{task[1:]}".replace(",)", ")")


@st.composite
def passes(draw: st.DrawFn, full: bool = False, most_experts: int = 8) -> Pass:
    """A pass of 1 to 4 PEs, cut into launches between any of its stages; tokens and fillers differ by PE."""
    world, local = draw(st.integers(1, 4)), draw(st.integers(1, most_experts))
    chunks, tiles_in, tiles_out = (draw(st.integers(1, 3)) for _ in range(3))
    grid = st.tuples(st.integers(1, 3), st.integers(1, 2))
    wgrads = tuple(draw(st.lists(grid, max_size=2)))
    # Which launch has the puts, the first GEMM, the second, the weight gradients, the reduction.
    put = 0
    first = put + draw(st.integers(0, 1))
    second = first + draw(st.integers(0, 1))
    third = second + draw(st.integers(0, 1))
    last = third + draw(st.integers(0, 1))
    dense = [
        draw(st.lists(st.lists(grid, max_size=3), min_size=last + 1, max_size=last + 1)) for _ in range(world)
    ]
    blocks = [draw(st.integers(0, 4)) for _ in range(world)]
    programs = draw(st.integers(1, 6))
    comm_programs = draw(st.integers(1, programs))
    shapes = [
        [
            LaunchShape(
                world, rank, local, chunks,
                put=launch == put,
                tiles_in=tiles_in if launch == first else 0,
                tiles_out=tiles_out if launch == second else 0,
                wgrads=wgrads if launch == third else (),
                dense=tuple(dense[rank][launch]),
                reduce_blocks=blocks[rank] if launch == last else 0,
                dweight_blocks=blocks[rank] if launch == put else 0,
                programs=programs, comm_programs=comm_programs,
            )
            for launch in range(last + 1)
        ]
        for rank in range(world)
    ]  # fmt: skip
    counts = st.just(chunks) if full else st.integers(0, chunks)
    return Pass(shapes, [[draw(counts) for _ in range(world * local)] for _ in range(world)])


def waits(task: Task, shape: LaunchShape, filled: list[list[int]]) -> Iterator[Fact]:
    """What the kernel waits for in this task."""
    kind, *numbers = task
    rank, local_experts = shape.rank, shape.local_experts
    mine = range(rank * local_experts, (rank + 1) * local_experts)
    if kind in (TILE_IN, TILE_OUT):
        source, local, m, _ = numbers
        yield "arrived", rank, source, local, 0
        if m < filled[source][mine[local]]:
            if kind == TILE_IN:
                yield "arrived", rank, source, local, m
            elif shape.tiles_in:
                yield from (("ready", rank, source, local, m, n) for n in range(shape.tiles_in))
    elif kind == WGRAD and shape.tiles_in:
        local = numbers[1]
        for source in range(shape.world):
            yield "arrived", rank, source, local, 0
            for m, n in product(range(filled[source][mine[local]]), range(shape.tiles_in)):
                yield "ready", rank, source, local, m, n
    elif kind == REDUCE:
        # Of the tokens in the block, which may sit anywhere: any chunk that this PE has sent.
        for expert, chunks in enumerate(filled[rank]):
            yield from (("returned", rank, *divmod(expert, local_experts), m) for m in range(chunks))


def reads(task: Task, whole: LaunchShape, filled: list[list[int]]) -> Iterator[Fact]:
    """What must be there when the task runs, waited for or not. `whole`: the launch with all stages in it."""
    kind, *numbers = task
    if kind in (WGRAD, REDUCE) or (
        kind in (TILE_IN, TILE_OUT) and numbers[2] < filled[numbers[0]][expert_of(task, whole)]
    ):
        yield from waits(task, whole, filled)


def expert_of(task: Task, shape: LaunchShape) -> int:
    return shape.rank * shape.local_experts + task[2]


def makes(
    task: Task, shape: LaunchShape, filled: list[list[int]], tiles_done: dict[Fact, int]
) -> Iterator[Fact]:
    """What is true after the task, as the kernel signals it."""
    kind, *numbers = task
    rank, local_experts = shape.rank, shape.local_experts
    if kind == PUT:
        expert, chunk = numbers
        if chunk == 0 or chunk < filled[rank][expert]:
            yield "arrived", expert // local_experts, rank, expert % local_experts, chunk
    elif kind in (TILE_IN, TILE_OUT):
        source, local, m, n = numbers
        if m >= filled[source][expert_of(task, shape)]:
            return
        if kind == TILE_IN:
            yield "ready", rank, source, local, m, n
        else:
            # The last tile of a chunk signals.
            fact = "returned", source, rank, local, m
            tiles_done[fact] = tiles_done.get(fact, 0) + 1
            if tiles_done[fact] == shape.tiles_out:
                yield fact


Needs = Callable[[Task, LaunchShape, list[list[int]]], Iterator[Fact]]


def run(one: Pass, lists: Lists, programs: int = 1, seed: int = 0, needs: Needs = waits) -> list[str]:
    """Let all programs take turns until none can go on. -> the tasks that are stuck, none if all are done.

    Raises AssertionError if a task runs before what it reads is there.
    """
    turns = random.Random(seed)
    facts: set[Fact] = set()
    tiles_done: dict[Fact, int] = {}
    launch = [0] * len(lists)
    claimed = [0] * len(lists)
    held: list[list[Task]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank in turns.sample(range(len(lists)), len(lists)):
            while launch[rank] < len(lists[rank]):
                shape, todo = one.shapes[rank][launch[rank]], lists[rank][launch[rank]]
                while len(held[rank]) < programs and claimed[rank] < len(todo):
                    held[rank].append(todo[claimed[rank]])
                    claimed[rank] += 1
                if not held[rank]:
                    launch[rank], claimed[rank] = launch[rank] + 1, 0
                    continue
                able = [task for task in held[rank] if facts.issuperset(needs(task, shape, one.filled))]
                if not able:
                    break
                task = turns.choice(able)
                missing = set(reads(task, in_one(one.shapes[rank]), one.filled)) - facts
                assert not missing, f"PE {rank} runs {named(task)} before {sorted(missing)}"
                held[rank].remove(task)
                facts.update(makes(task, shape, one.filled, tiles_done))
                moved = True
                # With several programs the others may come between any two tasks.
                if programs > 1:
                    break
    return [f"PE {rank} is stuck in {named(task)}" for rank, left in enumerate(held) for task in left]


def in_one(launches: list[LaunchShape]) -> LaunchShape:
    """The launch that has the stages of all of these."""
    return replace(
        launches[0],
        tiles_in=max(shape.tiles_in for shape in launches),
        tiles_out=max(shape.tiles_out for shape in launches),
    )


@given(one=passes())
@examples(200)
def test_one_program_per_pe_finishes(one: Pass) -> None:
    assert not run(one, one.lists())


@given(one=passes(full=True))
@examples(100)
def test_one_program_per_pe_finishes_when_every_chunk_is_full(one: Pass) -> None:
    assert not run(one, one.lists())


@given(one=passes(most_experts=3), programs=st.integers(2, 5), seed=st.integers(0, 1000))
@examples(100)
def test_several_programs_finish_and_read_nothing_too_early(one: Pass, programs: int, seed: int) -> None:
    assert not run(one, one.lists(), programs, seed)


@given(one=passes(full=True, most_experts=3))
@examples(100)
def test_needs_and_provides_say_what_the_kernel_does(one: Pass) -> None:
    """tasks.needs names what the kernel waits for when all chunks are full, but for what follows anyway."""
    for launches in one.shapes:
        for shape in launches:
            provided = set()
            for task in task_list(shape):
                said = {chunk_of(fact) for fact in tasks.needs(task, shape)}
                done = set(waits(task, shape, one.filled))
                if task[0] == TILE_IN or task[0] == REDUCE:
                    assert said == done
                else:
                    # That rows arrived follows from the first GEMM that is done with them.
                    assert said == {fact for fact in done if fact[0] != "arrived"}
                provided |= {chunk_of(fact) for fact in tasks.provides(task, shape)}
            counted: dict[Fact, int] = {}
            made = [fact for task in task_list(shape) for fact in makes(task, shape, one.filled, counted)]
            assert provided == set(made)


def chunk_of(fact: Fact) -> Fact:
    """A chunk of results returns as a whole; tasks.py counts its tiles."""
    return fact[:5] if fact[0] == "returned" else fact


@given(one=passes())
@examples(100)
def test_every_task_is_there_once(one: Pass) -> None:
    for launches in one.shapes:
        for shape in launches:
            local, each_chunk = range(shape.local_experts), range(shape.chunks)
            experts, sources = range(shape.world * shape.local_experts), range(shape.world)
            expected = list(product([PUT], experts, each_chunk)) if shape.put else []
            expected += product([TILE_IN], sources, local, each_chunk, range(shape.tiles_in))
            expected += product([TILE_OUT], sources, local, each_chunk, range(shape.tiles_out))
            for which, (rows, columns) in enumerate(shape.wgrads):
                expected += product([WGRAD], [which], local, range(rows), range(columns))
            for which, (rows, columns) in enumerate(shape.dense):
                expected += product([DENSE], [which], range(rows), range(columns))
            expected += product([REDUCE], range(shape.reduce_blocks))
            expected += product([DWEIGHT], range(shape.dweight_blocks))
            assert sorted(task_list(shape)) == sorted(expected)


def test_example_in_the_docstring() -> None:
    shape = LaunchShape(2, 0, 1, 1, tiles_in=1, tiles_out=1, reduce_blocks=1)
    assert task_list(shape) == [
        (PUT, 1, 0),
        (PUT, 0, 0),
        (TILE_IN, 0, 0, 0, 0),
        (TILE_IN, 1, 0, 0, 0),
        (TILE_OUT, 0, 0, 0, 0),
        (TILE_OUT, 1, 0, 0, 0),
        (REDUCE, 0),
    ]


def test_own_tiles_fill_the_time_of_puts() -> None:
    """Four PEs and two, two chunks, three programs of which one puts to peers."""
    shape = LaunchShape(4, 0, 1, 2, tiles_in=1, tiles_out=1, dense=((1, 2),), programs=3)
    beginning = [
        *[(PUT, 1, 0), (PUT, 0, 0), (PUT, 0, 1)],
        *[(PUT, 1, 1), (TILE_IN, 0, 0, 0, 0), (TILE_IN, 0, 0, 1, 0)],
        *[(PUT, 2, 0), (DENSE, 0, 0, 0), (DENSE, 0, 0, 1)],
        *[(PUT, 2, 1), (TILE_OUT, 0, 0, 0, 0), (TILE_OUT, 0, 0, 1, 0)],
        # Rows of PE 3 were sent while these put to PE 1.
        *[(PUT, 3, 0), (TILE_IN, 3, 0, 0, 0), (TILE_IN, 3, 0, 1, 0)],
        *[(PUT, 3, 1), (TILE_IN, 2, 0, 0, 0), (TILE_IN, 2, 0, 1, 0)],
    ]
    assert task_list(shape)[: len(beginning)] == beginning
    two = LaunchShape(2, 0, 1, 2, tiles_in=1, tiles_out=1, programs=3)
    assert task_list(two)[:7] == [
        *[(PUT, 1, 0), (PUT, 0, 0), (PUT, 0, 1), (PUT, 1, 1)],
        *[(TILE_IN, 0, 0, 0, 0), (TILE_IN, 0, 0, 1, 0), (TILE_IN, 1, 0, 0, 0)],
    ]


@given(one=passes())
@examples(100)
def test_tiles_stand_behind_the_puts_that_the_proof_names(one: Pass) -> None:
    """Those of source rank-s behind all puts to rank+1, ..., rank+s."""
    for shape in (shape for launches in one.shapes for shape in launches if shape.put):
        put_to: set[int] = set()
        each = shape.chunks * shape.local_experts
        count = [0] * shape.world
        for task in task_list(shape):
            if task[0] == PUT:
                step = (task[1] // shape.local_experts - shape.rank) % shape.world
                count[step] += 1
                put_to |= {step} if count[step] == each else set()
            elif task[0] in (TILE_IN, TILE_OUT):
                step = (shape.rank - task[1]) % shape.world
                assert put_to.issuperset(range(step + 1)), named(task)


# The same check must see what is wrong.

EXAMPLE = Pass(
    [
        [
            LaunchShape(
                2, rank, 2, 2, tiles_in=2, tiles_out=2, wgrads=((1, 1),), dense=((2, 1),), reduce_blocks=2
            )
        ]
        for rank in range(2)
    ],
    [[2, 1, 0, 2], [1, 2, 2, 1]],
)


def first(*kinds: int) -> Callable[[Task, int], int]:
    """A sort key: these kinds before all others."""
    return lambda task, rank: 0 if task[0] in kinds else 1


def last(own: bool) -> Callable[[Task, int], int]:
    """A sort key: puts to itself (or those to peers) behind everything else, the other puts first."""
    return lambda task, rank: 1 if task[0] != PUT else 2 if (task[1] // 2 == rank) == own else 0


# Each sorts the builder's lists by (task, rank); the order within equal keys stays.
WRONG_ORDERS: dict[str, Callable[[Task, int], int]] = {
    "tiles before puts": first(TILE_IN),
    "second GEMM before the first": first(PUT, TILE_OUT),
    "reductions before the tiles": first(PUT, REDUCE),
    "reductions before the second GEMM": first(PUT, TILE_IN, REDUCE),
    "weight gradients before the first GEMM": first(PUT, WGRAD),
    "puts to itself after the tiles": last(own=True),
    "puts to peers after the tiles": last(own=False),
    "second chunks after the tiles": lambda task, rank: int(task[0] == PUT and task[2] == 1),
}


def test_wrong_orders_start_from_a_right_one() -> None:
    assert not run(EXAMPLE, EXAMPLE.lists())


@pytest.mark.parametrize("mistake", WRONG_ORDERS)
def test_wrong_order_gets_stuck(mistake: str) -> None:
    key = WRONG_ORDERS[mistake]
    lists = [
        [sorted(todo, key=lambda task, rank=rank: key(task, rank)) for todo in launches]
        for rank, launches in enumerate(EXAMPLE.lists())
    ]
    assert lists != EXAMPLE.lists()
    stuck = run(EXAMPLE, lists)
    print(f"\n{mistake}: {'; '.join(stuck)}")
    assert stuck


@given(one=passes(most_experts=3), data=st.data())
@examples(100)
def test_any_task_before_one_that_it_waits_for_gets_stuck(one: Pass, data: st.DataObject) -> None:
    lists = one.lists()
    rank = data.draw(st.integers(0, len(lists) - 1))
    shape, todo = one.shapes[rank][0], lists[rank][0]
    pairs = [
        (later, earlier)
        for later, task in enumerate(todo)
        for earlier in range(later)
        if set(makes(todo[earlier], shape, one.filled, {})) & set(waits(task, shape, one.filled))
    ][:200]
    if pairs:
        later, earlier = data.draw(st.sampled_from(pairs))
        todo.insert(earlier, todo.pop(later))
        assert run(one, lists)


def test_a_missing_put_gets_stuck() -> None:
    lists = EXAMPLE.lists()
    lists[0][0].remove((PUT, 2, 0))
    assert EXAMPLE.filled[0][2] == 0
    assert run(EXAMPLE, lists) == ["PE 0 is stuck in REDUCE(0)", "PE 1 is stuck in TILE_IN(0, 0, 0, 0)"]


@pytest.mark.parametrize("kind", [TILE_IN, TILE_OUT, WGRAD, REDUCE])
def test_a_missing_wait_reads_too_early(kind: int) -> None:
    """Some turn of several programs takes the task before what it reads is there."""

    def careless(task: Task, shape: LaunchShape, filled: list[list[int]]) -> Iterator[Fact]:
        return iter(()) if task[0] == kind else waits(task, shape, filled)

    def runs() -> None:
        for seed in range(50):
            run(EXAMPLE, EXAMPLE.lists(), programs=16, seed=seed, needs=careless)

    with pytest.raises(AssertionError, match=rf"runs {NAMES[kind]}\("):
        runs()
