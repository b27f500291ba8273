"""What is kept for the backward, against a search over all subsets; recomputed instructions."""

from dataclasses import replace
from itertools import combinations

import pytest

from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program, TensorSpec, original_name
from lancet_kernels.predict.fusion import FUSED, fused, is_elementwise
from lancet_kernels.predict.parts import Parameter, Part, load_config, model_parts
from lancet_kernels.predict.saved import with_recomputation
from lancet_kernels.predict.step import kept_tensors, with_shapes
from lancet_kernels.schedules.time.peak_memory import peak_memory
from tests.lancet_kernels.predict.small_models import QWEN3, written


def made(sizes: dict[str, int]) -> Part:
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
    program = Program("made", instructions, tensors, ("x", "w", "dy"), ("c", "dx", "dw"), ("w",))
    return Part("layer", program, "x", "c", "dy", "dx", {"w": Parameter(4, False, "dw")})


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
    result = with_recomputation(made(sizes), "none")
    assert sum(sizes[t] for t in kept_tensors(result.program)) == smallest


def test_a_product_is_not_computed_again_but_with_full():
    sizes = {"a": 1000, "b": 1000, "c": 1}
    again = [
        i.name for i in with_recomputation(made(sizes), "none").program.instructions if original_name(i.name)
    ]
    assert "mm_recomputed" not in again
    full = with_recomputation(made(sizes), "full")
    assert not kept_tensors(full.program)
    assert {original_name(i.name) for i in full.program.instructions} >= {"mm", "wide", "narrow"}


def test_policies_keep_less_and_less(tmp_path):
    pytest.importorskip("transformers")
    parts = model_parts(load_config(written(tmp_path, QWEN3)), 4, 2, 64)
    layer = with_shapes(parts.kinds[0])
    sizes = {}
    for policy in ("none", "attention", "experts", "full"):
        result = with_recomputation(layer, policy)
        kept = kept_tensors(result.program)
        sizes[policy] = sum(result.program.tensors[t].content_bytes for t in kept)
    assert sizes["full"] == 0
    assert sizes["attention"] < sizes["none"]
    assert sizes["experts"] < sizes["none"]
    messages = [
        i for i in with_recomputation(layer, "full").program.instructions if i.kind is Kind.ALL_TO_ALL
    ]
    assert len(messages) == 5  # the dispatch again, for the weight gradients of the experts


def test_fused_groups_move_what_crosses_their_border():
    part = with_recomputation(made({"a": 10, "b": 1000, "c": 1}), "none")
    program = fused(part.program)
    assert [i.op for i in program.instructions if i.op == FUSED] == [FUSED, FUSED]
    forward, backward = (i for i in program.instructions if i.op == FUSED)
    assert (forward.inputs, forward.outputs, forward.bytes) == (("a",), ("c",), 11.0)
    # The backward computes b again inside: it reads a, c or its copy, and dy.
    assert "a" in backward.inputs
    assert "b" not in {t for i in program.instructions for t in i.outputs}


def test_fusing_keeps_the_memory_and_the_order_valid(tmp_path):
    pytest.importorskip("transformers")
    parts = model_parts(load_config(written(tmp_path, QWEN3)), 4, 2, 64)
    part = with_recomputation(with_shapes(parts.kinds[0]), "none")
    program = fused(part.program)
    assert len(program) < len(part.program) / 2
    assert peak_memory(program) <= peak_memory(part.program)
    assert sum(i.flops for i in program.instructions) == sum(i.flops for i in part.program.instructions)
    assert replace(program, name="again") is not program  # the constructor checks the order
    assert not [i for i in program.instructions if is_elementwise(i)]
