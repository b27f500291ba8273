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
        "CaptureError": "graph.capture.capture",
        "CausalLMStep": "transformers.convert",
        "ConversionReport": "transformers.convert",
        "GraphedStep": "optimization.graphed",
        "OptimizedModule": "optimization.optimized_module",
        "ParallelModule": "parallelization.parallel_module",
        "PartitionOptions": "schedules.cut.partition_range",
        "Plan": "schedules.plan",
        "PlanningOptions": "schedules.strategies",
        "ShardingStrategy": "schedules.shard.sharding_strategy",
        "SquareLinear": "parallelization.square_layer",
        "convert": "transformers.convert",
        "ddp": "layer.data_parallel",
        "export_state_dict": "transformers.checkpoints",
        "fsdp": "layer.data_parallel",
        "load_safetensors": "transformers.checkpoints",
        "optimize": "optimization.optimize",
        "overlap_pass": "optimization.overlap_pass",
        "parallelize": "parallelization.parallelize",
        "parallelize_linears": "parallelization.parallel_linears",
        "prepare_data_parallel": "layer.data_parallel",
        "reset_exchanges": "ops.moe.fused_experts",
        "save_safetensors": "transformers.checkpoints",
        "whole_state_dict": "parallelization.square_layer",
    }

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
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
