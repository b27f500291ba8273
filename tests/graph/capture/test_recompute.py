"""Recomputation of checkpointed blocks: what is in the backward, what is saved, when it may begin."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lancet_kernels import Dropout, MoELayer
from lancet_kernels.graph.capture.capture import Captured, capture, split_joint
from lancet_kernels.graph.from_fx import op_name, program_from_fx
from lancet_kernels.graph.program import Kind, Phase, Program, original_name
from lancet_kernels.schedules.rewrite.apply import instruction_order
from lancet_kernels.schedules.time.peak_memory import Recomputation, peak_memory

D = 8


def save_products(_context, op, *_arguments, **_by_name) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    """x + MoE(x + norm(dropouts of a tanh MLP of x)). The batch norm changes its buffers."""

    def __init__(self, site: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.norm = nn.BatchNorm1d(3)
        self.keyed, self.drawn = Dropout(0.2, site), nn.Dropout(0.1)
        self.moe = MoELayer(D, 2 * D, 4, top_k=2, gate="topk")

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.norm(self.keyed(self.down(self.drawn(torch.tanh(self.up(x))))))
        return y + self.moe(y)


class Step(nn.Module):
    def __init__(self, blocks: int = 2, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(site) for site in range(blocks))
        self.options = options
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return x.square().mean()


LARGE = 256
"""Sequences: activations count more than weights."""
EVERYTHING = {"use_reentrant": False}
SELECTIVE = {**EVERYTHING, "context_fn": partial(create_selective_checkpoint_contexts, save_products)}


def batch(size: int = 4) -> Tensor:
    return torch.randn(size, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


WAYS = {"plain": {}, "everything": EVERYTHING, "reentrant": {"use_reentrant": True}, "selective": SELECTIVE}


@pytest.fixture(scope="module")
def captured() -> dict[str, Captured]:
    """For a large batch, so that activations count more than weights."""
    return {way: capture(Step(**options), (batch(LARGE).requires_grad_(),)) for way, options in WAYS.items()}


@pytest.fixture(scope="module")
def programs(captured) -> dict[str, Program]:
    return {way: program_from_fx(one.joint) for way, one in captured.items()}


def recomputed_ops(program: Program) -> list[str]:
    return sorted(i.op for i in program.instructions if original_name(i.name) is not None)


def test_blocks_are_recomputed_in_the_backward(programs) -> None:
    program = programs["everything"]
    for instruction in program.instructions:
        original = original_name(instruction.name)
        if original is not None:
            assert instruction.phase is Phase.BACKWARD
            forward = program.instructions[program.index[original]]
            assert forward.phase is Phase.FORWARD
            assert (forward.op, forward.attributes) == (instruction.op, instruction.attributes)
    ops = recomputed_ops(program)
    assert ops.count("lancet.all_to_all") == 4  # dispatch and combine of two layers
    assert {"aten.tanh", "lancet.dropout", "lancet.expert_activation"} <= set(ops)
    assert recomputed_ops(programs["reentrant"]) == ops
    assert not recomputed_ops(programs["plain"])


def test_what_is_saved(programs) -> None:
    """Routing, random numbers, results of the blocks, and what reads a buffer that changes."""
    never = ("lancet.gate", "lancet.exchange_counts", "aten.native_dropout", "aten.bernoulli")
    ops = recomputed_ops(programs["everything"])
    assert not set(never) & set(ops)
    assert not any("batch_norm" in op for op in ops)
    # The result of a block is where the next one starts: the addition before it is not repeated.
    program = programs["everything"]
    results = [i for i in program.instructions if i.op == "aten.add" and i.phase is Phase.FORWARD]
    assert original_name(results[-1].name) is None
    assert f"{results[-1].name}_recomputed" not in program.index


def test_selective_checkpointing_saves_what_it_is_told_to(programs) -> None:
    ops = recomputed_ops(programs["selective"])
    assert "aten.tanh" in ops
    assert not {"aten.mm", "aten.addmm"} & set(ops)


def test_memory_is_saved(programs) -> None:
    peaks = {name: peak_memory(program) for name, program in programs.items()}
    assert peaks["everything"] < peaks["selective"] < peaks["plain"]
    spent = Recomputation.of(programs["everything"], lambda instruction, _: 1.0)
    assert spent is not None
    assert spent.all_to_alls == spent.link_ms == 4
    assert spent.instructions == spent.compute_ms + 4 == len(recomputed_ops(programs["everything"]))
    # What is left is what differs between graphs: the order in which the backward frees activations.
    assert spent.saved_gb * 1e9 == pytest.approx(peaks["plain"] - peaks["everything"], rel=0.2)
    assert Recomputation.of(programs["plain"], lambda instruction, _: 1.0) is None


@pytest.mark.long
def test_a_block_waits_for_the_backward_of_the_one_before() -> None:
    """Two blocks are recomputed at a time, at most, in any order that the Program allows."""
    program = program_from_fx(capture(Step(3, **EVERYTHING), (batch(),)).joint)
    after = {i.after for i in program.instructions if i.after}
    assert len(after) == 2  # the first one begins with the backward
    for gate in after:
        assert original_name(gate) is None
        assert program.instructions[program.index[gate]].phase is Phase.BACKWARD
    for instruction in program.instructions:
        if instruction.after:
            position = program.index[instruction.name]
            assert program.index[instruction.after] in program.dependencies[position]


@pytest.mark.parametrize("way", [way for way, options in WAYS.items() if options])
def test_gradients_are_those_of_the_module(captured, way) -> None:
    """With the masks of torch's dropout, which the backward does not draw again."""
    x, step, plain = batch(LARGE).requires_grad_(), captured[way].module, Step()

    def gradients(module: nn.Module, call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return torch.autograd.grad(call(x), [x, *module.parameters()])

    found, expected = gradients(step, captured[way].compile(split_joint)), gradients(plain, plain)
    for own, other in zip(found, expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-12, atol=1e-14)


def test_forward_and_backward_run_each_instruction_once(captured) -> None:
    captured = captured["everything"]
    planned = instruction_order(captured.joint.graph)
    halves = split_joint(captured.joint, captured.forward_outputs)
    ran = [name for half in halves for name in instruction_order(half.graph)]
    assert len(ran) == len(set(ran))
    assert set(ran) <= set(planned)
    collectives = [n for n in halves[1].graph.nodes if op_name(n) == "lancet.all_to_all"]
    assert len(collectives) == 8  # four recomputed, four of the gradients
    program = program_from_fx(captured.joint)
    assert len(program.positions(Kind.ALL_TO_ALL)) == 12


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.clone() * dy


class SquaredBlocks(Step):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: Squared.apply(torch.tanh(y)), x, use_reentrant=False)
        return x.sum()


def test_what_the_backward_of_a_function_reads_is_recomputed() -> None:
    """torch leaves that backward without the tag that tells it from the forward."""
    x = batch().requires_grad_()
    captured = capture(SquaredBlocks(0), (x,))
    program = program_from_fx(captured.joint)
    assert recomputed_ops(program).count("aten.tanh") == 2
    (gradient,) = torch.autograd.grad(captured.compile(split_joint)(x), x)
    (expected,) = torch.autograd.grad(SquaredBlocks(0)(x), x)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-14)
