"""Mixture-of-Experts training whose all-to-all hides behind the whole training graph."""

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.layer import MoELayer, expert_parameters, moe_layers, moe_losses, set_routing_step
from lancet_kernels.ops.losses import MoELosses, RoutingSums

__version__ = "0.1.0"

__all__ = [
    "CommunicationError",
    "MoELayer",
    "MoELosses",
    "RoutingSums",
    "UserError",
    "expert_parameters",
    "moe_layers",
    "moe_losses",
    "set_routing_step",
]
