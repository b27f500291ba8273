"""Random numbers of planned steps: those of the module, however it is cut, ordered and spread over ranks."""

import dataclasses
import zlib
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import MoELayer, UserError, optimize
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.from_fx import GENERATOR, draws_random_numbers, program_from_fx
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Instruction, TensorSpec
from lancet_kernels.schedules.order.ordering import sink_statistics
from lancet_kernels.schedules.rewrite.apply import reorder
from lancet_kernels.schedules.strategies import DUPLEX, STRATEGY_NAMES
from tests.optimized import BOUND, optimized
from tests.planned_steps import Outcome, SmallStep, StepCase, build_step, gradients, sum_over_ranks

CASE = StepCase(layers=2, batch=4, capacity_factor=None, dropout=0.1)

# ---- lancet_kernels.Dropout is cut like everything else


def planned_steps(case: StepCase, orders: int) -> tuple[list[float], list[int], float]:
    """-> how far each plan comes from the module, how many dropouts more its forward has, and the share
    of logits that dropout changes."""
    step = SmallStep(case)
    plain = step.plain()
    step.module.eval()
    changed = float((plain.outputs[3] != step.plain().outputs[3]).double().mean())
    step.module.train()
    dropouts = step.named("lancet.dropout")
    # Behind a gate that needs the whole batch; from the embedding on, where nothing does.
    gate = step.program.instructions[step.program.index[step.named("lancet.gate")[0]]]
    behind_gate = step.names[step.program.index[gate.name] + 1]
    first = dropouts[0] if gate.attributes["partitionable"] else behind_gate
    last = dropouts[-1] if gate.attributes["partitionable"] else dropouts[4]
    plans = [step.by_hand([step.cut(first, last, 3)])]
    plans += [step.by_hand([step.cut(first, last, 2)], seed) for seed in range(orders)]
    distances, parts = [], []
    for plan in plans:
        forward, backward = step.halves(plan)
        names = [n.name for n in forward.graph.nodes if n.name.startswith("dropout")]
        parts.append(len(names) - len(dropouts))
        distances.append(step.run(forward, backward).distance(plain))
    return distances, parts, changed


@pytest.mark.long
@pytest.mark.parametrize(("gate", "ranks"), [("random", 2), ("batch-prioritized", 1)])
def test_partitioned_models_drop_what_the_module_drops(pool, gate, ranks):
    case = dataclasses.replace(CASE, gate=gate, layers=4, batch=6)
    for distances, parts, changed in pool.run(planned_steps, case, 3, ranks=ranks, timeout_s=600):
        assert max(distances) < BOUND
        assert all(parts), "every plan has ranges with dropouts in them"
        assert changed > 0.9, "dropout changes the logits"


def global_batch(case: StepCase) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(0, 13, (2 * case.batch, case.sequence), generator=generator) for _ in "xy")


def whole_model(case: StepCase) -> nn.Module:
    """Every expert has the values of its global number, however many ranks there are."""
    module, _ = build_step(dataclasses.replace(case, batch=2))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            shape = list(parameter.shape)
            experts = name.endswith((".w1", ".w2"))
            if experts:
                shape[0] = case.experts
            values = 0.3 * torch.randn(shape, generator=numbers, dtype=torch.float64)
            if experts and dist.is_initialized():
                values = values.chunk(dist.get_world_size())[dist.get_rank()]
            parameter.copy_(values)
    return module


def part_of_the_batch(case: StepCase) -> dict[str, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = whole_model(case)
    inputs = tuple(value.chunk(ranks)[rank] for value in global_batch(case))
    ready = optimized(module, inputs, "duplex")
    assert any(i.startswith("dropout") and "_part" in i for i in ready.plan.order), "a dropout is cut"
    ready(*inputs)[0].backward()
    return gradients(module)


@pytest.mark.long
def test_ranks_together_are_one_process_with_the_whole_batch(pool):
    # Statistics of the router losses are of all ranks, so the whole objective is that of the whole batch.
    module = whole_model(CASE)
    module(*global_batch(CASE))[0].backward()
    wanted = gradients(module)
    first, second = pool.run(part_of_the_batch, CASE, ranks=2, timeout_s=180)
    for name, gradient in wanted.items():
        found = first[name]
        if name.endswith((".w1", ".w2")):
            found = torch.cat([first[name], second[name]])
        assert (found - gradient).abs().max() < BOUND * max(1.0, float(gradient.abs().max())), name


@pytest.mark.long
@pytest.mark.parametrize(("p", "dropouts"), [(0.0, 0), (0.1, 1 + 2 * CASE.layers)])
def test_without_dropout_the_graph_has_nothing_of_it(p, dropouts):
    program = SmallStep(dataclasses.replace(CASE, dropout=p)).program
    ops = [i.op for i in program.instructions]
    steps = [t for t in program.inputs if program.tensors[t].shape == () and not t.startswith("tangents")]
    assert ops.count("lancet.dropout") == 2 * dropouts, "forward and backward of each"
    assert len(steps) == dropouts, "a step for each"


# ---- torch's own random ops keep their order


DRAWS = ("native_dropout", "native_dropout_1", "rand_like", "native_dropout_2")


class TorchDropouts(nn.Module):
    """What is dropped first is needed last, so a plan would rather have it the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.second = MoELayer(8, 16, 4), MoELayer(8, 16, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        aside = self.dropout(self.early(x) + 1)
        x = self.dropout(self.late(x) + 1)
        noise = torch.rand_like(x)
        y = self.second(self.first(x) * noise)
        y = nn.functional.dropout(y, 0.3)
        return (y * aside).square().mean(), aside.detach(), y.detach()


# Copies of a step would draw other numbers than the whole: duplex refuses.
ONE_COPY = tuple(strategy for strategy in STRATEGY_NAMES if strategy not in DUPLEX)


def torch_dropouts(folder: str) -> dict[str, object]:
    """Each strategy's step against the module itself, from one state of the generator."""
    torch.manual_seed(3)
    module = TorchDropouts().double()
    inputs = (torch.randn(4, 5, 8, dtype=torch.float64),)
    torch.manual_seed(dist.get_rank())
    outputs = module(*inputs)
    outputs[0].backward()
    plain = Outcome(list(outputs), sum_over_ranks(module, gradients(module)))
    found = {}
    for strategy in ONE_COPY:
        ready = optimized(module, inputs, strategy)
        module.zero_grad(set_to_none=True)
        torch.manual_seed(dist.get_rank())
        outputs = ready(*inputs)
        outputs[0].backward()
        planned = Outcome(list(outputs), gradients(module))
        found[strategy] = (
            planned.distance(plain),
            all(torch.equal(a != 0, b != 0) for a, b in zip(outputs[1:], plain.outputs[1:], strict=True)),
            [name for name in ready.plan.order if name in DRAWS],
            ready.plan.explain(),
        )
    before = torch.get_rng_state()
    optimize(module, inputs, strategy="none", times=f"{folder}/times.json")
    return found | {"measuring leaves the generator alone": torch.equal(before, torch.get_rng_state())}


@pytest.mark.long
def test_torch_dropouts_draw_what_they_draw_in_the_module(pool, tmp_path):
    for found in pool.run(torch_dropouts, str(tmp_path), ranks=2, timeout_s=180):
        assert found.pop("measuring leaves the generator alone")
        for distance, same_masks, order, explained in found.values():
            assert same_masks
            assert distance < BOUND
            assert order == list(DRAWS)
            assert "use lancet_kernels.Dropout" in explained


def test_random_ops_depend_on_each_other_and_are_never_cut():
    captured = capture(TorchDropouts().double(), (torch.randn(4, 5, 8, dtype=torch.float64),))
    program = program_from_fx(captured.joint)
    random = [i for i, x in enumerate(program.instructions) if GENERATOR in x.mutates]
    assert [program.instructions[i].op for i in random] == [
        *("aten.native_dropout", "aten.native_dropout", "aten.rand_like", "aten.native_dropout"),
    ]
    for early, late in pairwise(random):
        assert early in program.dependencies[late]
    names = sink_statistics(program)  # the forward in front of the backward
    first, second = (names.index(program.instructions[i].name) for i in random[:2])
    # All of what the second reads, but not the first.
    swapped = [*names[:first], *names[first + 1 : second + 1], names[first], *names[second + 1 :]]
    with pytest.raises(
        UserError, match="native_dropout_1 before native_dropout, expected native_dropout first"
    ):
        reorder(captured.joint.graph, swapped)


def test_fused_attention_draws_only_with_dropout():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert not draws_random_numbers(graph.call_function(attention, (x, x, x)))
    assert not draws_random_numbers(graph.call_function(attention, (x, x, x, 0.0, True)))
    assert draws_random_numbers(graph.call_function(attention, (x, x, x, 0.1)))
    assert draws_random_numbers(graph.call_function(attention, (x, x, x), {"dropout_p": 0.1}))
    assert not draws_random_numbers(graph.call_function(torch.ops.lancet.dropout.default, (x,)))


def test_what_overwrites_is_not_cut():
    x = TensorSpec("x", (4, 4))
    relu = Instruction("i", "aten.relu", ("x",), ("y",))
    tensors = {"x": x, "y": TensorSpec("y", (4, 4))}
    rule = rule_for(relu)
    assert rule.assignments(relu, tensors, only_experts=False)
    written = dataclasses.replace(relu, mutates=("x",))
    assert rule.assignments(written, tensors, only_experts=False) == []
