"""Mixture-of-Experts training whose all-to-all hides behind the whole training graph."""

from typing import TYPE_CHECKING

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.layer.gradients import clip_gradients, set_gradient_group
from lancet_kernels.layer.model_layers import (
    Dropout,
    dropout,
    expert_parameters,
    moe_layers,
    moe_losses,
    set_routing_step,
)
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.ops.comm.stand_in import standing_for
from lancet_kernels.ops.moe.router import MoELosses, RoutingSums

if TYPE_CHECKING:
    from lancet_kernels.graph.capture.capture import CaptureError
    from lancet_kernels.layer.data_parallel import ddp, fsdp, prepare_data_parallel
    from lancet_kernels.ops.moe.fused_experts import reset_exchanges
    from lancet_kernels.optimization.graphed import GraphedStep
    from lancet_kernels.optimization.optimize import optimize
    from lancet_kernels.optimization.optimized_module import OptimizedModule
    from lancet_kernels.optimization.overlap_pass import overlap_pass
    from lancet_kernels.parallelization.parallel_linears import parallelize_linears
    from lancet_kernels.parallelization.parallel_module import ParallelModule
    from lancet_kernels.parallelization.parallelize import parallelize
    from lancet_kernels.parallelization.square_layer import SquareLinear, whole_state_dict
    from lancet_kernels.schedules.cut.partition_range import PartitionOptions
    from lancet_kernels.schedules.plan import Plan
    from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy
    from lancet_kernels.schedules.strategies import PlanningOptions
    from lancet_kernels.transformers.checkpoints import export_state_dict, load_safetensors, save_safetensors
    from lancet_kernels.transformers.convert import CausalLMStep, ConversionReport, convert
else:
    # Imported on first use, because they import torch's tracer.
    _HOMES = {
        "graph.capture.capture": "CaptureError",
        "layer.data_parallel": "ddp fsdp prepare_data_parallel",
        "ops.moe.fused_experts": "reset_exchanges",
        "optimization.graphed": "GraphedStep",
        "optimization.optimize": "optimize",
        "optimization.optimized_module": "OptimizedModule",
        "optimization.overlap_pass": "overlap_pass",
        "parallelization.parallel_linears": "parallelize_linears",
        "parallelization.parallel_module": "ParallelModule",
        "parallelization.parallelize": "parallelize",
        "parallelization.square_layer": "SquareLinear whole_state_dict",
        "schedules.cut.partition_range": "PartitionOptions",
        "schedules.plan": "Plan",
        "schedules.shard.sharding_strategy": "ShardingStrategy",
        "schedules.strategies": "PlanningOptions",
        "transformers.checkpoints": "export_state_dict load_safetensors save_safetensors",
        "transformers.convert": "CausalLMStep ConversionReport convert",
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for home, names in _HOMES.items():
            if name in names.split():
                return getattr(import_module(f"{__name__}.{home}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CausalLMStep",
    "CommunicationError",
    "ConversionReport",
    "Dropout",
    "GraphedStep",
    "Groups",
    "MoELayer",
    "MoELosses",
    "OptimizedModule",
    "ParallelModule",
    "PartitionOptions",
    "Plan",
    "PlanningOptions",
    "RoutingSums",
    "ShardingStrategy",
    "SquareLinear",
    "UserError",
    "clip_gradients",
    "convert",
    "ddp",
    "dropout",
    "expert_parameters",
    "export_state_dict",
    "fsdp",
    "load_safetensors",
    "moe_layers",
    "moe_losses",
    "optimize",
    "overlap_pass",
    "parallelize",
    "parallelize_linears",
    "prepare_data_parallel",
    "reset_exchanges",
    "save_safetensors",
    "set_gradient_group",
    "set_routing_step",
    "standing_for",
    "whole_state_dict",
]
