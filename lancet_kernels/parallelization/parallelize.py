"""`parallelize`: a model for one device in, this rank's sharded and duplexed training step out.

    capture on one device -> strategy (searched, or given) -> two microbatches -> shards and collectives
    -> optimize (order, early starts)

HiDup, sections 3 to 5. Results are those of the model on one device with the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import Cost, CostModel
from lancet_kernels.graph.costs.profiler import Profiler
from lancet_kernels.graph.program import Instruction, Program, fingerprint
from lancet_kernels.layer.expert_layer import is_number
from lancet_kernels.layer.model_layers import moe_layers
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_name, group_of, group_size
from lancet_kernels.optimization.guards import check_model, example_arguments
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.optimization.rank_agreement import alike, result_of_first_rank
from lancet_kernels.parallelization.one_device_model import OneDeviceModel
from lancet_kernels.parallelization.parallel_module import ParallelModule, sharded_module
from lancet_kernels.schedules.cut.duplex import COPIES
from lancet_kernels.schedules.shard.blocks import MESSAGE_KINDS
from lancet_kernels.schedules.shard.sharding_baselines import BASELINES, shared_baseline
from lancet_kernels.schedules.shard.sharding_search import search_sharding
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy
from lancet_kernels.schedules.strategies import PlanningOptions

HIDUP = "hidup"
SHARDINGS = (HIDUP, *BASELINES)
ORDER = "lancet-dw"
"""The plan's strategy, which orders the graph without cutting it; alternating stages are among the orders."""


@torch.inference_mode(False)
@torch.enable_grad()
def parallelize(
    model: nn.Module,
    example_inputs: Sequence[object] | Mapping[str, object],
    groups: AnyGroups | None = None,
    *,
    strategy: str | Path | ShardingStrategy = HIDUP,
    cluster: str | Path | Cluster | None = None,
    memory_gb: float | None = None,
    copies: int = COPIES,
    times: str | Path | None = None,
    options: PlanningOptions | None = None,
    inner_compile: str = "",
    verbose: bool = False,
) -> ParallelModule:
    """Turn a model for one device into this rank's part of the same training step on all ranks.

    Collective: all ranks of the job call it with the same model and the same inputs. All get the parameters
    and the strategy of the first rank.

    Args:
        model: its forward returns the loss, or tensors from which every rank calculates it alike. Parameters
            that are not sharded stay those of `model`.
        example_inputs: the whole batch, a tuple by position or a dict by name, as for one device. Every rank
            gets the whole batch in every step; its slice is taken inside.
        groups: the ranks: a DeviceMesh of one dimension, a process group, or the expert group of `Groups`;
            None: all of the job.
        strategy: "hidup": the fastest that the search finds; a baseline: "data parallel", "expert parallel"
            (GShard's), "replicated"; or a `ShardingStrategy`, or the file of one.
        cluster: search and plan for a cluster (a name, a TOML file) instead of measuring one microbatch on
            this machine.
        memory_gb: of a device: the search drops strategies that need more.
        copies: microbatches, of which one communicates while another computes. 1: the batch is not cut.
        times, options, inner_compile, verbose: as for `optimize`.
    Returns: a new module, which shares with `model` the parameters that stay whole.
    Raises: CaptureError (no single graph), UserError (no process group, sizes that the ranks do not divide, a
        strategy of another program, memory_gb without a search, ranks that disagree).
    """
    check_model(model)
    if not is_number(copies, Integral) or copies < 1:
        raise UserError(
            "copies of parallelize",
            got=repr(copies),
            expected="how many microbatches, at least 1",
            do="leave it out for 2",
        )
    group, mesh = _group(groups, next(model.parameters()).device.type)
    strategy = _strategy_or_file(strategy)
    if memory_gb and strategy != HIDUP:
        raise UserError(
            "memory_gb of parallelize",
            got=f"one, with strategy {strategy if isinstance(strategy, str) else 'given'}",
            expected="none: only a search uses it",
            do="leave it out",
        )
    if layers := moe_layers(model):
        raise UserError(
            f"model {type(model).__name__} to parallelize",
            got=f"{len(layers)} MoELayer(s), whose experts are on their ranks already",
            expected="a model for one device, experts as a dimension of dense tensors",
            do="use optimize() for MoELayers",
        )
    own = Groups.of_ranks(group)
    arguments = example_arguments(model, example_inputs)
    device_model = alike(
        lambda: OneDeviceModel(model, arguments, copies),
        lambda one: fingerprint(one.microbatch_program()),
        own.world,
        "model to parallelize",
        "give every rank the same whole batch",
    )
    chosen = _strategy(device_model, strategy, own, cluster, memory_gb, times)
    graph = device_model.sharded_graph(chosen, own.expert)
    optimized = optimize(
        sharded_module(model, graph, device_model.forms(chosen), own.expert, device_model.tensors),
        tuple(device_model.leaves[position] for position in device_model.input_positions),
        strategy=ORDER,
        cluster=cluster,
        times=times,
        options=options,
        # All ranks compute one loss together.
        reduce_gradients="sum",
        groups=own,
        inner_compile=inner_compile,
        verbose=verbose,
    )
    return ParallelModule(optimized, chosen, device_model, mesh)


def _group(groups: AnyGroups | None, device: str) -> tuple[str, DeviceMesh]:
    """The name of the group, and its mesh. Raises: UserError where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "parallelize",
            got="no process group",
            expected="one, of the ranks that share the model",
            do="start the ranks with torchrun and call torch.distributed.init_process_group()",
        )
    if isinstance(groups, DeviceMesh):
        if groups.ndim != 1:
            raise UserError(
                "mesh to parallelize on",
                got=f"{groups.ndim} dimensions {groups.mesh_dim_names or ''}",
                expected="one: a tensor is cut along one of its dimensions at a time",
                do="give one dimension of it, mesh['name'], or a flat mesh",
            )
        return group_name(groups.get_group()), groups
    group = groups or dist.group.WORLD
    if isinstance(group, Groups):
        if not group.expert:
            raise UserError(
                "groups to parallelize on",
                got="an expert group of one rank",
                expected="ranks that share the model",
                do="give their process group",
            )
        group = group_of(group.expert)
    assert group is not None
    return group_name(group), DeviceMesh.from_group(group, device)


def _strategy_or_file(strategy: str | Path | ShardingStrategy) -> str | Path | ShardingStrategy:
    """A str is a name, or else a file."""
    if not isinstance(strategy, str) or strategy in SHARDINGS:
        return strategy
    if not Path(strategy).is_file():
        raise UserError(
            "strategy",
            got=repr(strategy),
            expected=f"one of {', '.join(SHARDINGS)}, a ShardingStrategy, or the file of one",
            do="check the name",
        )
    return Path(strategy)


def _strategy(
    model: OneDeviceModel,
    strategy: str | Path | ShardingStrategy,
    groups: Groups,
    cluster: str | Path | Cluster | None,
    memory_gb: float | None,
    times: str | Path | None,
) -> ShardingStrategy:
    """The first rank's strategy, on every rank. Raises: UserError on every rank if it has none."""
    ranks = group_size(groups.expert)
    if isinstance(strategy, str):
        if cluster is None:
            program, cost = _measured(model, groups, times)
        else:
            program, cost = model.microbatch_program(), CostModel.for_cluster(load_cluster(cluster), ranks)

    def make() -> ShardingStrategy:
        if isinstance(strategy, str):
            if strategy in BASELINES:
                return shared_baseline(strategy, program, ranks, cost)
            return search_sharding(program, ranks, cost, memory_gb=memory_gb)
        sharding = ShardingStrategy.load(strategy) if isinstance(strategy, Path) else strategy
        if sharding.ranks != ranks:
            raise UserError(
                f"sharding of {sharding.program}",
                got=f"one for {sharding.ranks} ranks",
                expected=f"one for {ranks}",
                do="search again for these ranks",
            )
        sharding.check(model.microbatch_program(sharding.program))
        return sharding

    return result_of_first_rank(groups.world, make)


def _measured(model: OneDeviceModel, groups: Groups, times: str | Path | None) -> tuple[Program, Cost]:
    """The microbatch's Program with times measured on this device, and costs for it. Collective."""
    module, values = model.microbatch, model.values(model.microbatch)
    device = next(model.model.parameters()).device
    profiler = Profiler(groups, device, times)
    measured = profiler.program(module, values)
    largest = max(spec.content_bytes for spec in measured.tensors.values())
    messages = [
        Instruction(name, f"sharding.{name}", kind=kind, bytes=largest, attributes={"collective": name})
        for name, kind in MESSAGE_KINDS.items()
    ]
    with_messages = replace(measured, instructions=(*measured.instructions, *messages))
    cost = profiler.costs(module, values, with_messages, 1)
    return model.as_forward(measured), cost
