"""A forward graph as ranks run it: for strategies of random costs, which use every form and collective."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import fx

from lancet_kernels.graph.from_fx import op_name
from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.parallelization.one_device_model import OneDeviceModel
from lancet_kernels.parallelization.parallel_module import sharded_module
from lancet_kernels.predict.own_step import fake_ranks
from lancet_kernels.schedules.shard.sharding_search import search_sharding
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy
from tests.grids import few_of
from tests.schedules.shard.test_sharding_signatures import tiny


def random_strategy(model: OneDeviceModel, ranks: int, seed: int) -> ShardingStrategy:
    """The best one where costs are at random, and messages cheap."""

    def cost(instruction, tensors) -> float:
        attributes = instruction.attributes
        name = instruction.name.partition("_part")[0]
        key = repr((seed, name, attributes.get("forms"), attributes.get("collective")))
        number = int(hashlib.sha256(key.encode()).hexdigest()[:6], 16) / 0xFFFFFF
        return 0.02 * number if instruction.kind.is_communication else number

    return search_sharding(model.microbatch_program(), ranks, cost, most_labels=20)


def errors_of(name: str, layers: int, copies: int, seeds: list[int]) -> tuple[float, float, Counter[str]]:
    """Largest error of a loss and of a gradient; how often each op of the graphs occurs."""
    model, batch = tiny(name, 8, layers)
    expected = model(*batch)
    expected.backward()
    source = OneDeviceModel(model, (tuple(batch), {}), copies)
    group, ranks = group_name(None), dist.get_world_size()
    loss_error = gradient_error = 0.0
    ops: Counter[str] = Counter()
    for seed in seeds:
        strategy = random_strategy(source, ranks, seed)
        graph, forms = source.sharded_graph(strategy, group), source.forms(strategy)
        ops.update(op_name(node) for node in graph.nodes if node.op == "call_function")
        module = sharded_module(model, graph, forms, group, source.tensors)
        (loss,) = module(*batch)
        loss_error = max(loss_error, (loss - expected).abs().item())
        own = dict(module.named_parameters())
        for (name_of, whole), gradient in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(own.values())), strict=True
        ):
            dim = forms[name_of].dimension
            if dim is None:
                wanted = whole.grad
                gradient = gradient.clone()
                dist.all_reduce(gradient)
            else:
                wanted = whole.grad.chunk(ranks, dim)[dist.get_rank()]
            gradient_error = max(gradient_error, (gradient - wanted).abs().max().item())
    return loss_error, gradient_error, ops


def places(graph: fx.Graph, strategy: ShardingStrategy, copy: int) -> list[tuple[list[int], list[int]]]:
    """Where the collectives that a stage of a microbatch begins with stand, and its products, by stage."""
    place = {node.name: n for n, node in enumerate(graph.nodes)}
    found, seen = [], set()
    for stage in strategy.stages:
        changes = {(c.tensor.partition("."), c.target, c.collective) for c in stage.communication}
        names = {f"{t}_part{copy}{'_' if dot else ''}{i}_{how}" for (t, dot, i), _, how in changes - seen}
        seen |= changes
        products = {f"{name}_part{copy}" for name in stage.computation if "mm" in name}
        found.append(tuple(sorted(place[n] for n in of if n in place) for of in (names, products)))
    return found


@pytest.mark.long
def test_one_microbatch_communicates_in_front_of_the_computation_of_the_other():
    """Section 4.1: communication of stage n of the first, computation of stage n - 1 of the second, ..."""
    model, batch = tiny("bert-sgmoe")
    source = OneDeviceModel(model, (tuple(batch), {}), 2)
    strategy = random_strategy(source, 2, 0)
    with fake_ranks(2):
        graph = source.sharded_graph(strategy, group_name(None))
    first, second = (places(graph, strategy, copy) for copy in (0, 1))
    compared = 0
    for n in range(1, len(strategy.stages)):
        in_order = [first[n][0], second[n - 1][1], second[n][0], first[n][1]]
        in_order = [positions for positions in in_order if positions]
        compared += len(in_order) == 4
        assert all(a[-1] < b[0] for a, b in pairwise(in_order)), (n, in_order)
    assert compared


@pytest.mark.parametrize(
    ("name", "layers", "ranks", "copies", "seeds"),
    few_of(
        [
            ("bert-sgmoe", 1, 2, 2, [5]),
            *(
                (name, 2, (2, 4)[(i + j) % 2], copies, list(range(4)))
                for i, name in enumerate(("bert-sgmoe", "vit-switch"))
                for j, copies in enumerate((1, 2, 4))
            ),
        ]
    ),
)
def test_any_strategy_has_the_numbers_of_one_device(pool, name, layers, ranks, copies, seeds):
    for loss, gradient, ops in pool.run(errors_of, name, layers, copies, seeds, ranks=ranks, timeout_s=600):
        assert loss < 1e-12
        assert gradient < 1e-9  # routing is in float32
        used = {op for op in ops if op.startswith("lancet.")}
        assert used >= {
            f"lancet.{op}" for op in ("all_gather", "all_reduce", "exchange_shards", "take_shard")
        }
