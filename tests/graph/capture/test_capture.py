"""Capture: what cannot be captured says why; what was captured trains like the module, bit for bit."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils._pytree import tree_leaves

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import CaptureError, capture, split_joint
from lancet_kernels.graph.capture.captured_graph import copy_of
from lancet_kernels.graph.from_fx import op_name, program_from_fx, tensor_names
from lancet_kernels.graph.program import Phase
from tests.grids import few_of
from tests.model_zoo import MODELS, Size, make_model


class BranchOnData(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class ReadsANumber(nn.Module):
    def forward(self, x):
        return x * x.max().item()


class ReturnsANumber(nn.Module):
    def forward(self, x):
        return x * 2, x.max().item()


@pytest.mark.parametrize("module", [BranchOnData(), ReadsANumber(), ReturnsANumber()])
def test_what_cannot_be_captured_says_why_in_one_line(module):
    with pytest.raises(CaptureError) as caught:
        capture(module, (torch.randn(3, requires_grad=True),))
    message = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert "\n" not in message
    assert type(module).__name__ in message
    assert "fullgraph=True" in message
    assert caught.value.__cause__ is not None
    assert "got test_capture.py, line " in message
    reason = caught.value.got.lower()
    assert "data-dependent" in reason or "depends on data" in reason


def reads_a_number(_module, _inputs, output):
    return output * output.max().item()


class Doubles:
    """A hook that is an object."""

    def __call__(self, _module, _inputs, output):
        return 2 * output if output.sum() > 0 else output

    def backward(self, _module, _gradients, _results):
        return None


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (
            lambda m: m[0].register_forward_hook(reads_a_number),
            "got hook reads_a_number on 0, test_capture.py",
        ),
        (lambda m: m[0].register_forward_hook(partial(reads_a_number)), "got hook reads_a_number on 0, "),
        (lambda m: m[1].register_forward_hook(Doubles()), "got hook Doubles on 1, "),
        (
            lambda m: m[1].register_full_backward_hook(Doubles().backward),
            "backward hook Doubles.backward on 1,",
        ),
    ],
)
def test_a_hook_that_cannot_be_captured_is_named_with_its_module(register, said):
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module[0].register_forward_hook(lambda _module, _inputs, output: output.abs())
    register(module)
    with pytest.raises(CaptureError) as caught:
        capture(module, (torch.randn(2, 3),))
    assert said in str(caught.value)


class Flag:
    """What modules outside of torch write to while they run."""

    value = False


FLAG = Flag()


class WritesAFlag(nn.Module):
    """Sets it and an attribute of its own, and sets both back if `restores`."""

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.busy, self.restores = False, restores

    def forward(self, x):
        FLAG.value = self.busy = True
        y = x * 2 if FLAG.value else x
        if self.restores:
            FLAG.value = self.busy = False
        return y


def test_a_write_that_is_undone_is_no_side_effect():
    x = torch.randn(3, requires_grad=True)
    program = program_from_fx(capture(WritesAFlag(restores=True), (x,)).joint)
    assert "aten.mul" in [i.op for i in program.instructions]
    with pytest.raises(UserError, match=r"a forward that writes .*FLAG\.value"):
        capture(WritesAFlag(restores=False), (x,))
    assert FLAG.value is False


class InAMode(nn.Module):
    """Enters and leaves a mode, of which torch keeps a stack: as transformers does for masks."""

    def forward(self, x):
        with TransformGetItemToIndex():
            return x * 2


def test_a_mode_that_is_left_is_no_side_effect():
    captured = capture(InAMode(), (torch.randn(3, requires_grad=True),))
    assert "aten.mul" in [i.op for i in program_from_fx(captured.joint).instructions]


def test_the_code_of_a_copy_is_generated_when_it_runs_and_anew_after_a_change():
    module = fx.symbolic_trace(nn.ReLU())
    with mock.patch.object(fx.Graph, "python_code", side_effect=AssertionError("generated")):
        copy = copy_of(copy_of(module))
        copy.recompile()
        with pytest.raises(AssertionError, match="generated"):
            copy(torch.ones(2))
    x = torch.tensor([-1.0, 2.0])
    assert copy(x).tolist() == [0, 2]
    output = copy.graph.output_node()
    with copy.graph.inserting_before(output):
        output.args = (copy.graph.call_function(torch.neg, output.args),)
    copy.recompile()
    assert copy(x).tolist() == [0, -2]
    assert module(x).tolist() == [0, 2]


def test_gradients_of_inputs_and_of_weights_are_instructions_of_their_own():
    model, inputs = make_model("gpt2", Size(layers=2))
    captured = capture(model, inputs)
    program = program_from_fx(captured.joint)
    outputs = [
        n if n is None else tensor_names(n)[0]
        for n in tree_leaves(captured.joint.graph.output_node().args, is_leaf=lambda n: n is None)
    ]
    parameters = captured.parameter_of_gradient()
    ops = [i.op for i in program.instructions]
    linears = ops.count("aten.addmm")
    # Each addmm: dX and dW are an mm each. The head and the routers are an mm, with two more each.
    forward_mm = sum(i.op == "aten.mm" and i.phase is Phase.FORWARD for i in program.instructions)
    backward_mm = sum(i.op == "aten.mm" and i.phase is Phase.BACKWARD for i in program.instructions)
    assert backward_mm == 2 * (linears + forward_mm)
    assert ops.count("lancet.grouped_gemm") == ops.count("lancet.grouped_gemm_dx") == 2
    assert ops.count("lancet.grouped_gemm_dw") == 2
    assert sorted(parameters.values()) == sorted(name for name, _ in model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for position, name in parameters.items():
        assert program.tensors[outputs[position]].shape == shapes[name]


def test_a_second_shape_is_captured_as_plainly_as_the_first():
    """Dynamo would make sizes symbols once it has seen two; a plan is for one shape."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    for batch in (3, 5, 7):
        captured = capture(model, (torch.randn(batch, 4, requires_grad=True),))
        for node in captured.joint.graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, torch.Tensor) or all(type(n) is int for n in value.shape)
            assert not op_name(node).startswith("aten.sym_")


@pytest.mark.parametrize("name", few_of(MODELS))
def test_the_captured_graphs_train_like_eager(name):
    model, inputs = make_model(name, Size(layers=2))
    captured = capture(model, inputs)
    run = captured.compile(split_joint)
    loss = model(*inputs)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    found = run(*inputs)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
    found.backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], rtol=1e-12, atol=1e-12, msg=n)
