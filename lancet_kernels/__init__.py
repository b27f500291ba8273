"""Mixture-of-Experts training whose all-to-all hides behind the whole training graph."""

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.layer import MoELayer, expert_parameters, moe_layers, moe_losses, set_routing_step
from lancet_kernels.ops.losses import MoELosses, RoutingSums


def __getattr__(name: str) -> object:
    """`optimize` and `OptimizedModule` bring the solver and torch's tracer: imported when first asked for."""
    if name in ("optimize", "OptimizedModule", "CaptureError"):
        from importlib import import_module

        home = "lancet_kernels.graph.capture" if name == "CaptureError" else "lancet_kernels.optimization"
        return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CommunicationError",
    "MoELayer",
    "MoELosses",
    "OptimizedModule",
    "RoutingSums",
    "UserError",
    "expert_parameters",
    "moe_layers",
    "moe_losses",
    "optimize",
    "set_routing_step",
]
