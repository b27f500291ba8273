"""`optimize(inner_compile=...)`: pieces between communications are compiled, and nothing else changes."""

from __future__ import annotations

import operator
import shutil

import pytest
import torch

from lancet_kernels import optimize
from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.run import GraphRunner, compile_between_communications, stands_alone
from tests.planned_steps import StepCase, build_step, gradients


def loss_and_gradients(case: StepCase, times: str, inner_compile: str) -> dict[str, torch.Tensor]:
    step, inputs = build_step(case)
    planned = optimize(step, inputs, times=times, inner_compile=inner_compile)
    for _ in range(2):
        step.zero_grad()
        loss = planned(*inputs)[0]
        loss.backward()
    return gradients(step) | {"loss": loss.detach()}


def worst_difference(case: StepCase, times: str, inner_compile: str) -> float:
    plain = loss_and_gradients(case, times, "")
    compiled = loss_and_gradients(case, times, inner_compile)
    assert plain.keys() == compiled.keys()
    return max(float((plain[name] - compiled[name]).abs().max()) for name in plain)


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_pieces_give_the_same_step(pool, tmp_path, compiler) -> None:
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    case = StepCase(batch=2, layers=2)
    found = pool.run(worst_difference, case, str(tmp_path / "times.json"), compiler, timeout_s=500)
    assert max(found) < 1e-10


@pytest.mark.long
def test_a_graph_is_cut_at_its_communication(monkeypatch) -> None:
    """Every piece that is compiled has no communication inside, and the order of all nodes is the same."""
    step, inputs = build_step(StepCase(batch=2, layers=2))
    runners = []
    make = GraphRunner.__init__
    monkeypatch.setattr(GraphRunner, "__init__", lambda self, *a: (make(self, *a), runners.append(self))[0])
    optimize(step, inputs, strategy="lancet-dw", cluster="p4de")(*inputs)[0].backward()
    assert len(runners) == 2
    for runner in runners:
        seen = []
        monkeypatch.setattr(torch, "compile", lambda piece, seen=seen, **_: seen.append(piece) or piece)
        parts = compile_between_communications(runner.module, "inductor")
        assert seen
        inside = [node for piece in seen for node in piece.graph.nodes if node.op == "call_function"]
        assert not any(stands_alone(node) for node in inside if node.target is not operator.getitem)
        alone = [
            n
            for n in runner.module.graph.nodes
            if n.op == "call_function" and n.target is not operator.getitem
        ]
        assert any(stands_alone(node) for node in alone)
        calls = [getattr(parts, node.target) for node in parts.graph.nodes if node.op == "call_module"]
        # By what they call: cutting gives nodes new names.
        order = [n.target for piece in calls for n in piece.graph.nodes if n.op == "call_function"]
        wanted = [node.target for node in alone]
        assert [target for target in order if target is not operator.getitem] == wanted


def test_an_unknown_compiler_is_refused() -> None:
    step, inputs = build_step(StepCase(batch=2, layers=2))
    with pytest.raises(UserError, match="inner_compile"):
        optimize(step, inputs, inner_compile="fastest")
