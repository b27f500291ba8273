"""Random numbers of planned steps: those of the module, however it is cut, ordered and spread over ranks."""

import dataclasses
import zlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.optimized import BOUND, optimized
from tests.planned_steps import SmallStep, StepCase, build_step, gradients

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
    plans = [step.planner(2).plan("lancet"), step.planner(3).plan("lancet-partition")]
    dropouts = step.named("lancet.dropout")
    # Behind a gate that needs the whole batch; from the embedding on, where nothing does.
    gate = step.program.instructions[step.program.index[step.named("lancet.gate")[0]]]
    behind_gate = step.names[step.program.index[gate.name] + 1]
    first = dropouts[0] if gate.attributes["partitionable"] else behind_gate
    last = dropouts[-1] if gate.attributes["partitionable"] else dropouts[4]
    plans += [step.by_hand([step.cut(first, last, 2)], seed) for seed in range(orders)]
    distances, parts = [], []
    for plan in plans:
        forward, backward = step.halves(plan)
        names = [n.name for n in forward.graph.nodes if n.name.startswith("dropout")]
        parts.append(len(names) - len(dropouts))
        distances.append(step.run(forward, backward).distance(plain))
    return distances, parts, changed


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_partitioned_model_drops_what_the_module_drops(pool, ranks):
    for distances, parts, changed in pool.run(planned_steps, CASE, 1, ranks=ranks, timeout_s=180):
        assert max(distances) < BOUND
        assert all(parts), "every plan has ranges with dropouts in them"
        assert changed > 0.9, "dropout changes the logits"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("gate", ["switch", "random", "batch-prioritized"])
def test_partitioned_models_drop_what_the_module_drops(pool, gate, ranks):
    case = dataclasses.replace(CASE, gate=gate, layers=4, batch=6)
    for distances, _, _ in pool.run(planned_steps, case, 5, ranks=ranks, timeout_s=600):
        assert max(distances) < BOUND


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
    ready = optimized(module, inputs)
    assert any(i.startswith("dropout") and "[" in i for i in ready.plan.order), "a dropout is cut"
    ready(*inputs)[0].backward()
    return gradients(module)


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


def test_without_dropout_the_graph_has_nothing_of_it(pool):
    without, with_dropout = pool.run(programs, CASE, ranks=1)[0]
    assert without == (0, 0)
    assert with_dropout[0] == 2 * (1 + 2 * CASE.layers), "forward and backward of each"
    assert with_dropout[1] == 1 + 2 * CASE.layers, "a step for each"


def programs(case: StepCase) -> list[tuple[int, int]]:
    """-> dropouts and their steps among the inputs, without and with a probability."""
    found = []
    for p in (0.0, case.dropout):
        step = SmallStep(dataclasses.replace(case, dropout=p))
        dropouts = [i for i in step.program.instructions if i.op in ("lancet.dropout", "lancet.token_index")]
        steps = [t for t in step.program.inputs if step.program.tensors[t].shape == ()]
        tangents = sum(t.startswith("tangents") for t in steps)
        found.append((sum(i.op == "lancet.dropout" for i in dropouts), len(steps) - tangents))
    return found
