"""Every rule of the table is proven in torch: cut, run part by part, put together, compare in fp64."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.graph.from_fx import is_instruction, op_name
from lancet_kernels.graph.ops import OPS
from tests.capturing import read_only_step
from tests.examples import examples
from tests.graph.cut_and_reassemble import Recorder, check_node, key_of, one_op
from tests.graph.samples import FUSED, IRREGULAR_ONLY, ONLY_ON_CUDA, SAMPLES, Draw
from tests.model_zoo import MODELS, Size

PARTS = (2, 3, 5)
PROVEN: dict[tuple, int] = {}
"""Ops of several models are proven once: by op, shapes and attributes -> number of proofs."""


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_op_of_a_model_as_its_rule_says(name):
    """On the values that it has in the model: each op once per shapes, each way, 2 to 5 parts."""
    step = read_only_step(name, Size(batch=5))
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
