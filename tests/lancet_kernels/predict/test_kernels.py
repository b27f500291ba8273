"""A Program as kernels: by hand for three ops, and of a model's layer."""

import pytest

from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.graph.costs.costs import LAUNCHES, SORTS
from lancet_kernels.graph.program import Kind
from lancet_kernels.predict.kernels import Kernels
from lancet_kernels.predict.model_step import model_step
from lancet_kernels.predict.question import Question
from lancet_kernels.schedules.time.peak_memory import peak_memory
from tests.lancet_kernels.predict.small_models import QWEN3, written
from tests.lancet_kernels.predict.test_recomputation import three_ops

SENDS = load_cluster("dgx-h100").dispatchers


def test_a_group_moves_what_crosses_its_border():
    """exp and sum are one kernel: it reads a (10 bytes), and writes b (1000), which the backward reads, and c
    (1). The backward's mul is one of its own: dy, b, c, and dc."""
    program, kernels = Kernels(SENDS["all-to-all"], 1).of(three_ops({"a": 10, "b": 1000, "c": 1}))
    bytes_of = {i.name: i.bytes for i in program.instructions}
    assert bytes_of == {
        "mm": 1.0, "wide": 0.0, "narrow": 10 + 1000 + 1, "pointwise": 4 + 1000 + 1 + 4, "dgrad": 1.0,
        "wgrad": 1.0,
    }  # fmt: skip
    launches = {i.name: i.attributes.get(LAUNCHES) for i in program.instructions}
    assert launches["wide"] is True
    assert launches["narrow"] is False
    assert not kernels.inside


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    pytest.importorskip("transformers")
    hf = written(tmp_path_factory.mktemp("qwen3"), QWEN3, num_hidden_layers=1)
    return model_step(Question(hf, "dgx-h100", 4, 4, "none", sequence=64), 1)


@pytest.mark.parametrize("dispatcher", ["all-to-all", "deepep"])
def test_a_layer_as_kernels(step, dispatcher):
    plain = step.program
    program, kernels = Kernels(SENDS[dispatcher], 4).of(plain)
    assert [i.name for i in program.instructions] == [i.name for i in plain.instructions]
    assert [(i.inputs, i.flops) for i in program.instructions] == [
        (i.inputs, i.flops) for i in plain.instructions
    ]
    moved = sum(i.bytes for i in program.instructions if i.op.startswith("aten.") and not i.flops)
    assert 0 < moved < sum(i.bytes for i in plain.instructions if i.op.startswith("aten.") and not i.flops)
    # Each exchange of rows has one product before or behind which they are sorted.
    sorting = [i for i in program.instructions if SORTS in i.attributes]
    assert len(sorting) == len(program.positions(Kind.ALL_TO_ALL)) == 4
    assert peak_memory(program) < peak_memory(plain)
    copied = [t for t in kernels.with_copies(program).tensors if t not in program.tensors]
    assert len(copied) == (4 if dispatcher == "all-to-all" else 0)


def test_what_is_inside_a_kernel_takes_no_memory_in_parts_either(step):
    program, kernels = Kernels(SENDS["all-to-all"], 4).of(step.program)
    inside = next(t for t in kernels.inside if step.program.tensors[t].bytes)
    assert program.tensors[inside].bytes == 0
    assert kernels.in_memory(step.program).tensors[inside].bytes == 0
