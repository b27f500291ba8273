"""The search of shardings against every strategy there is, and its costs against the clock."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given as drawn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.forms import PARTIAL, WHOLE, Form
from lancet_kernels.graph.program import Instruction, Program, TensorSpec
from lancet_kernels.schedules.sharding import Strategy, duplexed, search_sharding
from lancet_kernels.schedules.sharding_costs import BACKWARD, psi_of
from lancet_kernels.schedules.sharding_search import Search
from lancet_kernels.schedules.signatures import signatures
from lancet_kernels.schedules.simulate import simulate
from tests.examples import examples
from tests.schedules.sharding_examples import given, graphs

RANKS = 2


def brute_force(program: Program, bound: float = float("inf")) -> float:
    """The smallest psi of all strategies: every order of the instructions, every signature, every way for a
    parameter to rest, a new stage or not in front of each. Written from section 4.1, without labels.

    Args: bound: strategies that cannot get below it are left out (costs never shrink).
    -> infinite where none is below the bound.
    """
    best = float("inf")
    with_gradient = set(program.parameters)
    for i in program.instructions:
        if with_gradient & set(i.inputs):
            with_gradient |= set(i.outputs)
    ways = {i.name: signatures(i, program, RANKS, given) for i in program.instructions}
    fastest = {name: min(signature.ms for signature in of) for name, of in ways.items()}

    def message(collective: str, tensor: str) -> float:
        size = program.tensors[tensor].content_bytes / (RANKS if collective == "all_to_all" else 1)
        return 1 + size / 4

    conversions = {
        ("cut", "whole"): ("all_gather", "reduce_scatter"),
        ("cut", "cut"): ("all_to_all", "all_to_all"),
        ("partial", "whole"): ("all_reduce", "all_reduce"),
        ("partial", "cut"): ("reduce_scatter", "all_gather"),
    }

    def psi(stages: list[list[float]]) -> float:
        forward = [(comm, comp) for comm, _, comp in stages]
        backward = [(comm_b, BACKWARD * comp) for _, comm_b, comp in stages]
        return psi_of(forward) + psi_of(backward)

    def explore(done: frozenset[str], held: dict[str, set[Form]], new: set[str], stages: list) -> None:
        nonlocal best
        # What is left computes at least as long as its fastest signatures.
        left = sum(fastest[i.name] for i in program.instructions if i.name not in done)
        if stages and psi(stages) + (1 + BACKWARD) * left >= min(best, bound):
            return
        if len(done) == len(program.instructions):
            best = min(best, psi(stages))
            return
        for instruction in program.instructions:
            ready = all(t in held for t in instruction.inputs if t not in program.inputs)
            if instruction.name in done or not ready:
                continue
            for signature in ways[instruction.name]:
                for rest_sliced in (False, True):
                    for opens in (False, True):
                        step(done, held, new, stages, instruction, signature, rest_sliced, opens)

    def step(done, held, new, stages, instruction, signature, rest_sliced, opens) -> None:
        if opens and not stages:
            return
        fresh = set() if opens or not stages else set(new)
        stages = [list(s) for s in stages]
        if opens or not stages:
            stages.append([0.0, 0.0, 0.0])
        held = {t: set(forms) for t, forms in held.items()}
        for t, wanted in zip(instruction.inputs, signature.inputs, strict=True):
            if t in program.parameters:
                if wanted == WHOLE and rest_sliced:
                    stages[-1][0] += message("all_gather", t) / 2
                    stages[-1][1] += message("reduce_scatter", t) / 2
                elif wanted == WHOLE:
                    stages[-1][1] += message("all_reduce", t) / 2
                continue
            if t in program.inputs:
                if wanted == PARTIAL:
                    return
                continue
            if wanted in held[t] or (wanted.is_cut and WHOLE in held[t]):
                continue
            times = [
                tuple(message(name, t) for name in conversions[h.kind, wanted.kind])
                for h in held[t]
                if (h.kind, wanted.kind) in conversions
            ]
            if t in fresh or not times:
                return
            forward, backward = min(times, key=sum)
            stages[-1][0] += forward
            stages[-1][1] += backward if t in with_gradient else 0.0
            held[t].add(wanted)
        stages[-1][2] += signature.ms
        for t, form in zip(instruction.outputs, signature.outputs, strict=True):
            held[t] = {form}
            fresh.add(t)
        explore(done | {instruction.name}, held, fresh, stages)

    explore(frozenset(), {}, set(), [])
    return best


@examples(150)
@drawn(graphs(most=3))
def test_search_equals_brute_force(program):
    found = Search(program, RANKS, given, grouped=False).run()
    assert found.is_exact
    assert found.best.psi == pytest.approx(brute_force(program), abs=1e-9)


@pytest.mark.long
@examples(40)
@drawn(graphs(most=8))
def test_nothing_beats_the_search_on_graphs_of_up_to_eight(program):
    found = Search(program, RANKS, given, grouped=False).run()
    assert brute_force(program, found.best.psi - 1e-6) == float("inf")


@examples(100)
@drawn(graphs(most=6, least=2))
def test_no_dominated_state_is_kept(program):
    found = Search(program, RANKS, given, grouped=False, keep_states=True).run()
    assert found.kept
    for labels in found.kept.values():
        for a, b in combinations(labels, 2):
            for one, other in ((a, b), (b, a)):
                # A closed stage's computation is what hides communication: phi = -slack.
                better = one.psi <= other.psi and -one.slack <= -other.slack
                assert not better, f"{one[:7]} dominates {other[:7]}"


def chain(*lines: tuple[str, float]) -> Program:
    """`(op, milliseconds)` one after another, on x [4, 4]; `mm` with a weight of its own."""
    shape = (4, 4)
    tensors = {"x": TensorSpec("x", shape)}
    inputs, instructions, last = ["x"], [], "x"
    for n, (op, ms) in enumerate(lines):
        reads = [last]
        if op == "mm":
            tensors[f"w{n}"] = TensorSpec(f"w{n}", shape)
            inputs.append(f"w{n}")
            reads.append(f"w{n}")
        tensors[f"t{n}"] = TensorSpec(f"t{n}", shape)
        attributes = {"dim": 0 if op == "_softmax" else 1} if "softmax" in op else {}
        instructions.append(
            Instruction(
                f"{op}{n}",
                f"aten.{op}",
                reads,
                (f"t{n}",),
                flops=float(op == "mm"),
                milliseconds=ms,
                attributes=attributes,
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


def test_the_costs_of_a_strategy_are_those_of_its_stages():
    strategy = search_sharding(CHAIN, RANKS, given)
    forward = [(stage.comm_ms, stage.comp_ms) for stage in strategy.stages]
    backward = [(stage.comm_backward_ms, stage.comp_backward_ms) for stage in strategy.stages]
    assert strategy.predicted_ms == pytest.approx(psi_of(forward) + psi_of(backward))
    assert set().union(*(stage.computation for stage in strategy.stages)) == set(CHAIN.index)


def test_fewer_kept_strategies_are_no_better_and_say_how_far_off_they_may_be():
    best = search_sharding(CHAIN, RANKS, given)
    limited = search_sharding(CHAIN, RANKS, given, most_labels=1)
    assert best.gap == 0
    assert limited.lower_bound_ms <= best.predicted_ms <= limited.predicted_ms


def test_memory_limit_shards_weights():
    free = search_sharding(CHAIN, RANKS, given)
    tight = search_sharding(CHAIN, RANKS, given, memory_gb=free.memory_bytes * 0.9 / 1e9)
    assert tight.memory_bytes <= free.memory_bytes * 0.9
    assert tight.predicted_ms >= free.predicted_ms
    with pytest.raises(UserError, match="no strategy within"):
        search_sharding(CHAIN, RANKS, given, memory_gb=1e-9)


def test_json_both_ways_and_explain(tmp_path):
    strategy = search_sharding(CHAIN, RANKS, given)
    assert Strategy.from_json(json.loads(json.dumps(strategy.to_json()))) == strategy
    strategy.save(tmp_path / "strategy.json")
    assert Strategy.load(tmp_path / "strategy.json", CHAIN) == strategy
    text = strategy.explain()
    assert all(name in text for name in CHAIN.index)
    assert "all_to_all" in text
    assert "beside" in text
    with pytest.raises(UserError, match="search again"):
        Strategy.load(tmp_path / "strategy.json", chain(("mm", 1.0)))
    with pytest.raises(UserError, match="sharding JSON"):
        Strategy.from_json({"format": "other"})


def test_a_program_with_collectives_is_refused():
    wrong = Program(
        "wrong",
        (Instruction("a2a", "lancet.all_to_all", ("x",), ("y",), "all_to_all"),),
        {t: TensorSpec(t, (4,)) for t in "xy"},
        ("x",),
    )
    with pytest.raises(UserError, match="without collectives"):
        search_sharding(wrong, RANKS, given)
