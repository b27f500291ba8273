"""Mixture-of-Experts training whose all-to-all hides behind the whole training graph."""

from lancet_kernels.dropout_layer import Dropout, dropout
from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.layer import MoELayer
from lancet_kernels.model_layers import expert_parameters, moe_layers, moe_losses, set_routing_step
from lancet_kernels.ops.groups import Groups
from lancet_kernels.ops.losses import MoELosses, RoutingSums
from lancet_kernels.training.gradients import set_gradient_group

# Imported on first use, because they import the solver and torch's tracer.
_HOMES = {
    "CaptureError": "lancet_kernels.graph.capture",
    "CausalLMStep": "lancet_kernels.conversion.causal_lm",
    "ConversionReport": "lancet_kernels.conversion.convert",
    "GraphedStep": "lancet_kernels.graphed",
    "OptimizedModule": "lancet_kernels.optimized_module",
    "ParallelModule": "lancet_kernels.parallel_module",
    "SquareLinear": "lancet_kernels.square_layer",
    "convert": "lancet_kernels.conversion.convert",
    "ddp": "lancet_kernels.training.data_parallel",
    "export_state_dict": "lancet_kernels.conversion.export",
    "load_safetensors": "lancet_kernels.conversion.load",
    "optimize": "lancet_kernels.optimization",
    "parallelize": "lancet_kernels.parallelization",
    "prepare_data_parallel": "lancet_kernels.training.data_parallel",
    "reset_exchanges": "lancet_kernels.ops.fused_experts",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
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
    "RoutingSums",
    "SquareLinear",
    "UserError",
    "convert",
    "ddp",
    "dropout",
    "expert_parameters",
    "export_state_dict",
    "load_safetensors",
    "moe_layers",
    "moe_losses",
    "optimize",
    "parallelize",
    "prepare_data_parallel",
    "reset_exchanges",
    "set_gradient_group",
    "set_routing_step",
]
