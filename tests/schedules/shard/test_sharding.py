"""The search of shardings against every strategy there is, and its costs against the clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import example
from hypothesis import given as drawn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program import Instruction, Kind, Program, TensorSpec
from lancet_kernels.graph.rules.rules import PARTIAL, WHOLE
from lancet_kernels.schedules.shard.blocks import signatures
from lancet_kernels.schedules.shard.sharding_baselines import BASELINES, baseline
from lancet_kernels.schedules.shard.sharding_search import Search, search_sharding
from lancet_kernels.schedules.shard.sharding_states import StateSpace
from lancet_kernels.schedules.shard.sharding_strategy import BACKWARD, ShardingStrategy
from lancet_kernels.schedules.time.simulate import simulate
from tests.examples import examples
from tests.grids import few_of
from tests.schedules.sharding_examples import duplexed, given, graphs

RANKS = 2


CONVERSIONS = {
    ("cut", "whole"): ("all_gather", "reduce_scatter"),
    ("cut", "cut"): ("all_to_all", "all_to_all"),
    ("partial", "whole"): ("all_reduce", "all_reduce"),
    ("partial", "cut"): ("reduce_scatter", "all_gather"),
}


class BruteForce:
    """The smallest psi of all strategies, written from section 4.1: stage by stage, without labels.

    Between stages only this matters: which instructions are done, which forms there are of each tensor, and
    how long the last stage computed. From every such point all stages are tried out (every order of the
    instructions, every signature, every way for a parameter to rest); of two ways to the very same point the
    shorter one counts. Nothing is dropped because something else dominates it.

    Args: below: strategies that cannot get below it are left out (costs never shrink, and what is left
        computes at least as long as its fastest signatures).
    """

    def __init__(self, program: Program, below: float = float("inf")) -> None:
        self.program, self.below = program, below
        self.ways = {i.name: signatures(i, program, RANKS, given) for i in program.instructions}
        self.fastest = {name: min(signature.ms for signature in of) for name, of in self.ways.items()}
        self.with_gradient = set(program.parameters)
        for i in program.instructions:
            if self.with_gradient & set(i.inputs):
                self.with_gradient |= set(i.outputs)
        self.stages: dict[tuple, set[tuple]] = {}

    def smallest(self) -> float:
        """-> infinite where nothing is below the bound."""
        everything = frozenset(i.name for i in self.program.instructions)
        points = {(frozenset(), frozenset(), 0.0): 0.0}
        best = float("inf")
        while points:
            following: dict[tuple, float] = {}
            for (done, held, last), front in points.items():
                limit = min(best, self.below)
                for after, forms, comm, comm_b, comp in self.stages_from(done, held):
                    comp_b = BACKWARD * comp
                    psi = front + max(last, comm) + max(comm, comp)
                    psi += max(BACKWARD * last, comm_b) + max(comm_b, comp_b)
                    left = sum(ms for name, ms in self.fastest.items() if name not in after)
                    if psi + comp + comp_b + (1 + BACKWARD) * 2 * left >= limit:
                        continue
                    if after == everything:
                        best = limit = min(best, psi + comp + comp_b)
                        continue
                    point = after, forms, comp
                    following[point] = min(following.get(point, float("inf")), psi)
            points = following
        return best

    def stages_from(self, done: frozenset, held: frozenset) -> set[tuple]:
        """(done, forms, communication, that of backward, computation) behind each stage that may follow."""
        if (done, held) not in self.stages:
            seen = {(done, held, frozenset(), 0.0, 0.0, 0.0)}
            waiting = list(seen)
            while waiting:
                for behind in self.one_more(*waiting.pop()):
                    if behind not in seen:
                        seen.add(behind)
                        waiting.append(behind)
            self.stages[done, held] = {
                (after, forms, comm, comm_b, comp)
                for after, forms, _, comm, comm_b, comp in seen
                if after != done
            }
        return self.stages[done, held]

    def one_more(self, done, held, new, comm, comm_b, comp) -> Iterator[tuple]:
        """The stage with one more instruction. held: (tensor, form) pairs; new: tensors of this stage."""
        program = self.program
        there = {t for t, _ in held}
        for instruction in program.instructions:
            ready = all(t in there for t in instruction.inputs if t not in program.inputs)
            if instruction.name in done or not ready:
                continue
            for signature in self.ways[instruction.name]:
                for rest_sliced in (False, True):
                    cost = self.conversion(instruction, signature, held, new, rest_sliced)
                    if cost is None:
                        continue
                    forms, more, more_b = cost
                    produced = zip(instruction.outputs, signature.outputs, strict=True)
                    after = done | {instruction.name}
                    alive = needed_after(program, after)
                    yield (
                        after,
                        frozenset((t, f) for t, f in {*forms, *produced} if t in alive),
                        frozenset(t for t in {*new, *instruction.outputs} if t in alive),
                        comm + more,
                        comm_b + more_b,
                        comp + signature.ms,
                    )

    def conversion(self, instruction, signature, held, new, rest_sliced):
        """(held afterwards, communication, that of backward), or None where it cannot be."""
        program, comm, comm_b, held = self.program, 0.0, 0.0, set(held)
        for t, wanted in zip(instruction.inputs, signature.inputs, strict=True):
            if t in program.parameters:
                if wanted == WHOLE and rest_sliced:
                    comm += self.message("all_gather", t) / 2
                    comm_b += self.message("reduce_scatter", t) / 2
                elif wanted == WHOLE:
                    comm_b += self.message("all_reduce", t) / 2
                continue
            if t in program.inputs:
                if wanted == PARTIAL:
                    return None
                continue
            forms = [form for name, form in held if name == t]
            if wanted in forms or (wanted.is_cut and WHOLE in forms):
                continue
            times = [
                tuple(self.message(name, t) for name in CONVERSIONS[form.kind, wanted.kind])
                for form in forms
                if (form.kind, wanted.kind) in CONVERSIONS
            ]
            if t in new or not times:
                return None
            forward, backward = min(times, key=sum)
            comm += forward
            comm_b += backward if t in self.with_gradient else 0.0
            held.add((t, wanted))
        return held, comm, comm_b

    def message(self, collective: str, tensor: str) -> float:
        size = self.program.tensors[tensor].content_bytes / (RANKS if collective == "all_to_all" else 1)
        return 1 + size / 4


def needed_after(program: Program, done: frozenset[str]) -> set[str]:
    """Tensors that instructions read that are not done."""
    return {t for i in program.instructions if i.name not in done for t in i.inputs}


@examples(150)
@drawn(graphs(most=4, flops=1.0))
def test_search_equals_brute_force(program):
    best = Search(StateSpace(program, RANKS, given)).run("best")
    assert best.predicted_ms == pytest.approx(BruteForce(program).smallest(), abs=1e-9)


@pytest.mark.long
@examples(20)
@drawn(graphs(most=8, least=5, flops=1.0))
def test_search_equals_brute_force_on_graphs_of_up_to_eight(program):
    psi = Search(StateSpace(program, RANKS, given)).run("best").predicted_ms
    assert psi == pytest.approx(BruteForce(program, psi + 1e-6).smallest(), abs=1e-9)


class Recording(Search):
    """Searches every segment, and compares what it keeps of closed states."""

    def _pass(self, segment, states):
        return self.space.walk(segment, states, self._grow)

    def _closed(self, states):
        closed = super()._closed(states)
        for labels in closed.values():
            for one, other in permutations(labels, 2):
                # A closed stage's computation is what hides communication: phi = -slack.
                better = one.psi <= other.psi and -one.slack <= -other.slack
                assert not better, f"{one[:7]} dominates {other[:7]}"
        return closed


@examples(100)
@drawn(graphs(most=6, least=2, flops=1.0))
def test_no_dominated_state_is_kept(program):
    Recording(StateSpace(program, RANKS, given)).run("best")


def chain(*lines: tuple[str, float]) -> Program:
    """`(op, milliseconds)` one after another, on x [4, 4]; `mm` with a weight of its own."""
    shape = (4, 4)
    tensors = {"x": TensorSpec("x", shape)}
    inputs, instructions, last = ["x"], [], "x"
    for n, (op, ms) in enumerate(lines):
        reads = (last,)
        if op == "mm":
            tensors[f"w{n}"] = TensorSpec(f"w{n}", shape)
            inputs.append(f"w{n}")
            reads = (last, f"w{n}")
        tensors[f"t{n}"] = TensorSpec(f"t{n}", shape)
        attributes = {"dim": 0 if op == "_softmax" else 1} if "softmax" in op else {}
        instructions.append(
            Instruction(
                f"{op}{n}", f"aten.{op}", reads, (f"t{n}",), flops=1.0, milliseconds=ms, attributes=attributes
            )
        )
        last = f"t{n}"
    return Program("chain", tuple(instructions), tensors, tuple(inputs), (last,), tuple(inputs[1:]))


CHAIN = chain(("mm", 60.0), ("_softmax", 50.0), ("mm", 80.0), ("_log_softmax", 70.0), ("mm", 40.0))


@examples(100)
@drawn(graphs(most=8, is_chain=True))
def test_psi_is_the_simulated_time_of_the_alternating_microbatches(program):
    strategy = search_sharding(program, RANKS, given)
    assert simulate(duplexed(strategy), given).iteration_ms == pytest.approx(strategy.predicted_ms)


def test_a_chain_that_has_to_change_its_dimension_overlaps():
    strategy = search_sharding(CHAIN, RANKS, given)
    assert len(strategy.stages) > 1
    assert simulate(duplexed(strategy), given).iteration_ms == pytest.approx(strategy.predicted_ms)
    assert strategy.predicted_ms < strategy.serial_ms
    alone = search_sharding(CHAIN, 1, given)
    assert alone.predicted_ms == 2 * (1 + BACKWARD) * sum(i.milliseconds for i in CHAIN.instructions)
    assert strategy.predicted_ms < alone.predicted_ms


def test_fewer_kept_strategies_are_no_better():
    best = search_sharding(CHAIN, RANKS, given)
    limited = search_sharding(CHAIN, RANKS, given, most_labels=1)
    assert best.predicted_ms <= limited.predicted_ms


def test_memory_limit_shards_weights():
    free = search_sharding(CHAIN, RANKS, given)
    tight = search_sharding(CHAIN, RANKS, given, memory_gb=free.memory_bytes * 0.9 / 1e9)
    assert tight.memory_bytes <= free.memory_bytes * 0.9
    assert tight.predicted_ms >= free.predicted_ms
    pruned = search_sharding(CHAIN, RANKS, given, memory_gb=free.memory_bytes * 0.9 / 1e9, most_labels=1)
    assert pruned.memory_bytes <= free.memory_bytes * 0.9
    with pytest.raises(UserError, match="no strategy within 1e-09 GB a device, expected one that fits"):
        search_sharding(CHAIN, RANKS, given, memory_gb=1e-9)


def _of_960_bytes() -> Program:
    """Three products in a row and one beside them: 960 bytes, of which 960 / 1e9 * 1e9 is a little less."""
    *row, beside = (row_of_four := chain(*[("mm", 0.0)] * 4)).instructions
    beside = replace(beside, inputs=("x", *beside.inputs[1:]))
    return replace(row_of_four, instructions=(*row, beside))


@example(_of_960_bytes())
@examples(40)
@drawn(graphs(most=5, least=2))
def test_the_least_memory_is_enough(program):
    least = Search(StateSpace(program, RANKS, given), price=1e9).run("smallest").memory_bytes
    strategy = search_sharding(program, RANKS, given, memory_gb=least / 1e9, most_labels=1)
    assert strategy.memory_bytes == pytest.approx(least)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_are_no_faster_than_the_search(name):
    strategy = baseline(name, CHAIN, RANKS, given)
    assert search_sharding(CHAIN, RANKS, given).predicted_ms <= strategy.predicted_ms + 1e-9
    assert not any(form.is_cut for form in strategy.parameters.values())
    if name == "replicated":
        assert strategy.computation_ms == 2 * (1 + BACKWARD) * sum(i.milliseconds for i in CHAIN.instructions)


def psi_of(stages: list[tuple[float, float]]) -> float:
    """Equation (5) for (communication, computation) of each stage."""
    total, last = 0.0, 0.0
    for comm, comp in stages:
        total += max(last, comm) + max(comm, comp)
        last = comp
    return total + last


@examples(40)
@drawn(graphs(most=5, is_chain=True))
def test_backward_without_overlap(program):
    strategy = search_sharding(program, RANKS, given, overlaps_backward=False)
    forward = psi_of([(s.comm_ms, s.comp_ms) for s in strategy.stages])
    backward = 2 * sum(s.comm_backward_ms + s.comp_backward_ms for s in strategy.stages)
    assert strategy.predicted_ms == pytest.approx(forward + backward)
    overlapped = search_sharding(program, RANKS, given)
    assert overlapped.predicted_ms <= strategy.predicted_ms + 1e-9


@pytest.mark.parametrize("times", few_of((12, 3, 6)))
def test_repeated_layers_are_searched_once(times):
    layer = (("mm", 60.0), ("_softmax", 50.0), ("mm", 80.0), ("_log_softmax", 70.0))
    program = chain(*layer * times)
    limits = {"most_labels": 40, "tolerance": 0.01}
    once = Search(StateSpace(program, RANKS, given), **limits).run("once")
    each = Recording(StateSpace(program, RANKS, given), **limits).run("each")
    assert once.predicted_ms == pytest.approx(each.predicted_ms, rel=0.01)
    assert [name for stage in once.stages for name in stage.computation] == list(program.index)
    assert set(once.parameters) == set(program.parameters)
    if times == 12:
        assert once.strategies_looked_at < each.strategies_looked_at
    # What a stage communicates is read in it.
    for stage in once.stages:
        read = {t for name in stage.computation for t in program.instructions[program.index[name]].inputs}
        assert read.issuperset(c.tensor for c in stage.communication)


def test_json_both_ways_and_explain(tmp_path):
    strategy = search_sharding(CHAIN, RANKS, given)
    assert ShardingStrategy.from_json(json.loads(json.dumps(strategy.to_json()))) == strategy
    strategy.save(tmp_path / "strategy.json")
    assert ShardingStrategy.load(tmp_path / "strategy.json", CHAIN) == strategy
    rounded = replace(strategy, predicted_ms=strategy.computation_ms - 1e-9)
    assert " 0.00 ms in which it waits" in rounded.explain()
    text = strategy.explain()
    assert all(name in text for name in CHAIN.index)
    assert "all_to_all" in text
    assert "beside" in text
    parameter = next(iter(strategy.parameters))
    assert "layers.0.weight" in strategy.explain({parameter: "layers.0.weight"})
    assert f" {parameter} [" not in strategy.explain({parameter: "layers.0.weight"})
    with pytest.raises(UserError, match="search again"):
        ShardingStrategy.load(tmp_path / "strategy.json", chain(("mm", 1.0)))
    with pytest.raises(UserError, match="sharding JSON"):
        ShardingStrategy.from_json({"format": "other"})


def test_a_program_with_collectives_is_refused():
    wrong = Program(
        "wrong",
        (Instruction("a2a", "lancet.all_to_all", ("x",), ("y",), Kind.ALL_TO_ALL),),
        {t: TensorSpec(t, (4,)) for t in "xy"},
        ("x",),
    )
    with pytest.raises(UserError, match="without collectives"):
        search_sharding(wrong, RANKS, given)
