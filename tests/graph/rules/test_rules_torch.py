"""Every rule of the table is proven in torch: cut, run part by part, put together, compare in fp64.

A wrong rule is found out, and the table covers what models of three families do forward.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancet_kernels.graph.from_fx import is_instruction, op_name
from lancet_kernels.graph.ops import OPS, facts, rule_for
from lancet_kernels.graph.program import Kind, Phase
from lancet_kernels.graph.rules import derived
from lancet_kernels.graph.rules.rules import Rule
from lancet_kernels.schedules.cut.ranges import AxisInference
from tests.capturing import read_only_step
from tests.examples import examples
from tests.graph.cut_and_reassemble import Recorder, WrongRule, check_node, key_of, one_op
from tests.graph.samples import FUSED, IRREGULAR_ONLY, ONLY_ON_CUDA, SAMPLES, Draw
from tests.grids import few_of
from tests.model_zoo import MODELS, Size

BATCH = 5
"""No other size is a multiple of it."""
PARTS = (2, 3, 5)
PROVEN: dict[tuple, int] = {}
"""Ops of several models are proven once: by op, shapes and attributes -> number of proofs."""


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_op_of_a_model_as_its_rule_says(name):
    """On the values that it has in the model: each op once per shapes, each way, 2 to 5 parts."""
    step = read_only_step(name, Size(batch=BATCH))
    recorder = Recorder(step.joint)
    recorder.run(*step.values)
    own = {key_of(node): node for node in step.joint.graph.nodes if is_instruction(node)}
    for key, node in own.items():
        if key not in PROVEN:
            PROVEN[key] = check_node(node, recorder.values, PARTS)
    proofs = [PROVEN[key] for key in own]
    assert sum(map(bool, proofs)) >= 50
    assert sum(proofs) >= 150


def test_every_rule_has_a_proof():
    assert SAMPLES.keys() | ONLY_ON_CUDA | IRREGULAR_ONLY | FUSED == {
        op for op, row in OPS.items() if row.rule and not op.startswith("lancet_prediction.")
    }


@pytest.mark.parametrize("op", SAMPLES)
@examples(100)
@given(data=st.data())
def test_a_rule_on_drawn_shapes(op, data):
    target, args, kwargs = SAMPLES[op](Draw(data.draw))
    node, values = one_op(target, args, kwargs)
    assert op_name(node) == op
    check_node(node, values, PARTS)


NEVER_CUT = {
    "aten.arange": "made from nothing: every part uses all of it",
    "aten.zeros": "made from nothing",
    "aten.ones": "made from nothing",
    "aten.full": "made from nothing: a number of tokens",
    "aten.tril": "the causal mask has no batch",
    "aten.bitwise_not": "the causal mask has no batch",
    "aten.t": "transposes a weight",
}


@pytest.mark.parametrize("name", few_of(MODELS))
def test_between_the_all_to_alls_everything_is_cut_along_the_batch(name):
    step = read_only_step(name, Size(batch=BATCH))
    program = step.program
    first, *_, last = [
        i for i in program.positions(Kind.ALL_TO_ALL) if program.instructions[i].phase is Phase.FORWARD
    ]
    gate = max(i for i in range(first) if program.instructions[i].op == "lancet.gate")
    last = next(i for i in range(last, len(program)) if program.instructions[i].op == "lancet.combine")
    forms = AxisInference(program).forms(gate, last)
    sizes = {program.tensors[t].shape[form.dimension] for t, form in forms.items() if form.is_cut}
    assert {size % BATCH for size in sizes} == {0}
    whole = [
        i
        for i in program.instructions[gate : last + 1]
        if not any(t in forms for t in (*i.inputs, *i.outputs))
    ]
    assert {i.op for i in whole} <= NEVER_CUT.keys()
    assert not {i.op for i in whole if i.op == "aten.bitwise_not"} or "written-out" in name


@pytest.mark.parametrize("name", few_of(MODELS))
def test_forward_ops_without_a_rule_are_known(name):
    """Beside what is made from nothing: the sum over ranks, which needs everything."""
    program = read_only_step(name, Size(batch=BATCH)).program
    without = {i.op for i in program.instructions if i.phase is Phase.FORWARD and rule_for(i) is None}
    assert without <= {
        *("aten.arange", "aten.zeros", "aten.ones", "aten.full", "aten.scalar_tensor"),
        "lancet.sum_over_ranks",
    }


MUTATIONS: dict[str, tuple[str, Rule]] = {
    "softmax along its dimension": ("aten._softmax", Rule(derived=derived.elementwise)),
    "layer norm along its features": (
        "aten.layer_norm",
        Rule(("... d, d, d -> ... d", "... d, d -> ... d", "... d -> ... d")),
    ),
    "mm along the contraction": ("aten.mm", Rule(("t d, d f -> t d",))),
    "mm rows and columns mixed up": ("aten.mm", Rule(("t d, d f -> f t",))),
    "mm partial sums of the rows": ("aten.mm", Rule(("t+ d!, d! f! -> s! f!",))),
    "bias added by every summand": ("aten.addmm", Rule(("f, t d+, d+ f -> t f",))),
    "linear's weight cut along its input": (
        "aten.linear",
        Rule(("... d, d f -> ... f", "... d, d f, f -> ... f")),
    ),
    "embedding along the vocabulary": ("aten.embedding", Rule(("v d, v -> v d", "v d, v s -> v s d"))),
    "attention along the queries and keys": (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        Rule(("b h s d!, b h s d!, b h s d! -> b h s d!, b h s",)),
    ),
    "view's faster dimension": ("aten.view", Rule(("a b -> b", "a b c -> a c"))),
    "permute as if nothing moved": ("aten.permute", Rule(derived=derived.elementwise)),
    "transpose as if nothing moved": ("aten.transpose", Rule(derived=derived.elementwise)),
    "cumsum along its dimension": ("aten.cumsum", Rule(derived=derived.elementwise)),
    "split along its dimension": (
        "aten.split",
        Rule(("a -> a, a", "a b -> a b, a b", "a b c -> a b c, a b c")),
    ),
    "cat along its dimension": ("aten.cat", Rule(("a, a -> a", "a b, a b -> a b"))),
    "slice along its dimension": ("aten.slice", Rule(("a -> a", "a b -> a b"))),
    "select of another dimension": ("aten.select", Rule(("a b -> a", "a b c -> a b"))),
    "max as a mean": ("aten.amax", Rule(derived=derived.sums, averages=True)),
    "normalization's gradient along its features": (
        "aten.native_layer_norm_backward",
        Rule(("... d, ... d, ... d, ... d, d, d -> ... d, d, d",)),
    ),
    "bmm's partial sums added to a bias": ("aten.baddbmm", Rule(("b t f, b t d+, b d+ f -> b t f",))),
    "table's gradient along the table": ("aten.embedding_dense_backward", Rule(("t d, t -> t d",))),
    "gradient of attention along the queries": (
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        Rule(("b h s d!, b h s d!, b h s d!, b h s d!, b h s d!, b h s -> b h s d!, b h s d!, b h s d!",)),
    ),
    "logsumexp as partial sums": ("aten.logsumexp", Rule(derived=derived.sums)),
    "squeeze as any view": ("aten.squeeze", Rule(derived=derived.view)),
    "unflatten as any view": ("aten.unflatten", Rule(derived=derived.view)),
    "gather along its dimension": ("aten.gather", Rule(derived=derived.elementwise)),
    "tril along its rows": ("aten.tril", Rule(derived=derived.elementwise)),
    "stack as if appended": ("aten.stack", Rule(("a, a -> a 1", "a b, a b -> a b 1"))),
    "repeat along what is repeated": ("aten.repeat", Rule(("a -> a", "a b -> a b"))),
    "pad along what is padded": ("aten.constant_pad_nd", Rule(("a -> a", "a b -> a b"))),
    "dropout that does not know its tokens": ("lancet.dropout", Rule(("... d, -, d, - -> ... d",))),
    "dropout that does not know its features": ("lancet.dropout", Rule(("... d, ..., -, - -> ... d",))),
    "gate without capacity passing": (
        "lancet.gate",
        replace(
            facts("lancet.gate").rule,
            equations=(
                "t e!, - -> t k, t k, t k, *",
                "-, t -> t k, t k, t k, *",
                "t e!, -, - -> t k, t k, t k, *",
            ),
            carries=(),
        ),
    ),
    "weight gradient that forgets the sum": (
        "lancet.grouped_gemm_dw",
        Rule(("r d!, r f!, w! e! -> e! r f!",), in_experts=True),
    ),
    "bias gradient per part": (
        "lancet.grouped_gemm_dbias",
        Rule(("r f!, w! e! -> e! r",), in_experts=True),
    ),
    "experts' GEMM along its input width": (
        "lancet.grouped_gemm",
        Rule(("r! d, w! e!, e! d f! -> d f!",), in_experts=True),
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_rule_is_found_out(mutation):
    op, wrong = MUTATIONS[mutation]

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[*settings().phases][:3],
    )
    @given(data=st.data())
    def proof(data):
        target, args, kwargs = SAMPLES[op](Draw(data.draw))
        node, values = one_op(target, args, kwargs)
        check_node(node, values, (2, 3), wrong)

    with pytest.raises(WrongRule):
        proof()
