"""What is kept for the backward, against a search over all subsets; what the policies compute again."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec, original_name
from lancet_kernels.predict.answer import host_of
from lancet_kernels.predict.kernels import Kernels
from lancet_kernels.predict.microbatch import Microbatch
from lancet_kernels.predict.model_step import model_step
from lancet_kernels.predict.question import Question
from lancet_kernels.predict.recomputation import POLICIES, kept_tensors
from tests.lancet_kernels.predict.small_models import QWEN3, written


def three_ops(sizes: dict[str, int]) -> Program:
    """x -mm-> a -wide-> b -narrow-> c; the backward reads b and c element-wise, and x in a product."""
    tensors = {t: TensorSpec(t, (size,), "uint8") for t, size in sizes.items()}
    tensors |= {t: TensorSpec(t, (4,), "uint8") for t in ("x", "w", "dy", "dc", "dx", "dw")}

    def op(name, op, inputs, outputs, phase=Phase.FORWARD, flops=0.0):
        return Instruction(name, op, inputs, outputs, phase=phase, flops=flops, bytes=1.0)

    back = Phase.BACKWARD
    instructions = (
        op("mm", "aten.mm", ("x", "w"), ("a",), flops=1.0),
        op("wide", "aten.exp", ("a",), ("b",)),
        op("narrow", "aten.sum", ("b",), ("c",)),
        op("pointwise", "aten.mul", ("dy", "b", "c"), ("dc",), back),
        op("dgrad", "aten.mm", ("dc", "w"), ("dx",), back, 1.0),
        op("wgrad", "aten.mm", ("dc", "x"), ("dw",), back, 1.0),
    )
    return Program("three", instructions, tensors, ("x", "w", "dy"), ("c", "dx", "dw"), ("w",))


@pytest.mark.parametrize("a", [10, 1000])
@pytest.mark.parametrize("b", [10, 100, 1000])
@pytest.mark.parametrize("c", [1, 100])
def test_the_smallest_set_is_kept(a, b, c):
    sizes = {"a": a, "b": b, "c": c}
    # b and c can be computed from a; a only by a matrix product, which is not computed again.
    enough = [
        set(subset) for n in range(4) for subset in combinations(sizes, n) if "a" in subset or "b" in subset
    ]
    smallest = min(sum(sizes[t] for t in subset) for subset in enough)
    kept = kept_tensors(three_ops(sizes), "none") & set(sizes)
    assert sum(sizes[t] for t in kept) == smallest


def test_policies_keep_less_and_less(tmp_path):
    pytest.importorskip("transformers")
    hf = written(tmp_path, QWEN3, num_hidden_layers=1)
    kept, messages = {}, {}
    for policy in POLICIES:
        asked = Question(hf, "dgx-h100", 4, 4, "none", sequence=64, recompute=policy)
        program, _ = Kernels(asked.cost.carrier, 4).of(model_step(asked, 1).program)
        phases = {t: i.phase for i in program.instructions for t in i.outputs}
        read = {
            program.storage[t] for i in program.instructions if i.phase is Phase.BACKWARD for t in i.inputs
        }
        kept[policy] = sum(program.tensors[t].bytes for t in read if phases.get(t) is Phase.FORWARD)
        messages[policy] = len(program.positions(Kind.ALL_TO_ALL))
        again = {i.op for i in program.instructions if original_name(i.name)}
        assert ("lancet_prediction.attention" in again) is (policy in ("attention", "full"))
        assert ("lancet.grouped_gemm" in again) is (policy in ("experts", "full", "alternate"))
    assert kept["full"] < min(kept["attention"], kept["experts"])
    assert max(kept["attention"], kept["experts"]) < kept["none"]
    # The dispatch again, for the weight gradients of the experts; no combine.
    assert messages == {"none": 4, "attention": 4, "experts": 4, "full": 5, "alternate": 4}


def test_torchtitans_recomputation_of_ops_step_by_step(tmp_path):
    """Each second of q, k, v, o and the router; the experts' first product, whose result is read.
    No op is fused, so each is launched and moves its own operands."""
    pytest.importorskip("transformers")
    asked = Question(
        written(tmp_path, QWEN3, num_hidden_layers=1), "dgx-h100", 4, 4, "none", sequence=64,
        recompute="alternate", eager=True,
    )  # fmt: skip
    step = model_step(asked, 1)
    eager, fused = (Microbatch.of(replace(asked, eager=e), step).program for e in (True, False))
    again = Counter(i.op for i in eager.instructions if original_name(i.name))
    assert (again["aten.mm"], again["lancet.grouped_gemm"]) == (2, 1)
    launches = [sum(ms > 0 for ms in host_of(p, asked.cost).ms) for p in (eager, fused)]
    assert launches[0] == launches[1], "fused kernels are launched one by one, too"
    moved = [sum(i.bytes for i in p.instructions if not i.flops) for p in (eager, fused)]
    assert moved[0] > 1.3 * moved[1]
