"""transformers' experts on the ops of this library: registers `ep_implementation="lancet"`, for its expert
parallelism, and `experts_implementation="lancet"`, where one rank has all experts.

    import lancet_kernels.transformers.expert_parallel  # registers it
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=8, ep_size=4, ep_implementation="lancet")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)

For every architecture whose expert plan has an `ep_dispatch_experts` rule. Parameters stay as transformers
shards them: whole experts per rank of the expert group, FSDP over the ranks that hold the same experts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from itertools import count
from types import FrameType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils.parametrize import is_parametrized

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.layer.expert_layer import ExpertLayer
from lancet_kernels.ops.base import BEFORE_A_TRACE, during, now
from lancet_kernels.ops.comm.groups import EXPERT_GROUP, FORWARD_OF, Groups, group_name
from lancet_kernels.transformers.experts import (
    ConvertedExperts,
    expert_parallel,
    has_interface,
    reason_against,
)
from lancet_kernels.transformers.routers import keep_choices, keep_float32

try:
    from transformers.distributed.expert_parallel import (
        AllToAllEP,
        EPImplementation,
        EPImplementationInterface,
    )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"lancet_kernels.transformers.expert_parallel: got {error}, expected transformers' expert "
        "parallelism; pip install 'transformers>=5.23' accelerate"
    ) from error

NAME = "lancet"
_ALONE = "lancet_experts"
"""Attribute of experts on one rank: the same experts as a layer of this library."""
_ANY_KERNEL = (None, "eager", "batched_mm", "grouped_mm", NAME)
"""Values of `experts_implementation` that our grouped GEMMs replace; others name a kernel."""
_last_model: tuple[Callable[[], object], count] = (lambda: None, count())
"""A weak reference to the `model_key` (`_layer_name`) of the last sharded model, and its layer numbers."""


class LancetEP(EPImplementation):
    """Sends each (token, choice) to the rank of its expert and back: compact rows, counts first.

    Experts with plain weights become those of `experts`; others, quantized ones say, run their own forward
    in transformers' `AllToAllEP`.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts, self.slices, self.own = experts, tp_mesh.size(), None
        self.why_own = _why_own(experts)
        if self.why_own:
            self.own = AllToAllEP(experts, ep_mesh, tp_mesh)
        else:
            expert_parallel(experts, ep_mesh.get_group())
            experts.name = _layer_name(getattr(experts, "config", ep_mesh))
            _keep_routing(experts)
        setattr(experts, EXPERT_GROUP, group_name(ep_mesh.get_group()))
        setattr(experts, FORWARD_OF, self.forward_of)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Shapes and errors as of `ConvertedExperts.forward`."""
        if self.own is not None:
            return self.own(hidden_states, top_k_index, top_k_weights)
        # All ranks of a tensor-parallel group have these tokens, and each sends a slice of them.
        tokens = len(hidden_states)
        sliced = (
            self._redistributed(tensor, Replicate(), Shard(0), tokens)
            for tensor in (hidden_states, top_k_index, top_k_weights)
        )
        y_TD = type(self.experts).forward(self.experts, *sliced)
        return self._redistributed(y_TD, Shard(0), Replicate(), tokens)

    def forward_of(self, experts: nn.Module) -> Callable[..., Tensor]:
        """The forward of another module with the same experts, to be captured. Raises: UserError for experts
        that run their own forward: the number of their rows would become a constant of the graph."""
        if self.why_own:
            raise UserError(
                f"experts {class_name(self.experts)}", got=self.why_own,
                expected="experts that run on the ops of lancet_kernels", do="train without optimize()",
            )  # fmt: skip
        return MethodType(type(self.experts).forward, experts)

    def _redistributed(self, tensor: Tensor, source: Placement, target: Placement, rows: int) -> Tensor:
        """A tensor of `rows` rows over the tensor-parallel group, in another placement."""
        if self.slices == 1:
            return tensor
        size = torch.Size((rows, tensor.shape[1]))
        whole = DTensor.from_local(
            tensor.contiguous(), self.tp_mesh, [source], run_check=False, shape=size, stride=(size[1], 1)
        )
        return whole.redistribute(self.tp_mesh, [target]).to_local()


def _why_own(experts: nn.Module) -> str:
    """The reason why experts run their own forward; "": they do not."""
    if not has_interface(experts):
        return "no `use_experts_implementation` of transformers, which says how weights lie"
    kernel = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return reason_against(experts) if kernel in _ANY_KERNEL else f"experts_implementation={kernel!r}"


def _keep_routing(experts: nn.Module) -> None:
    """Call `keep_choices` and `keep_float32` for the block with these experts. transformers passes the
    experts alone; the block is found on the stack, in the caller's `model` or `self`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for caller in (frame.f_locals.get("model"), frame.f_locals.get("self")):
            for name, block in caller.named_modules() if isinstance(caller, nn.Module) else ():
                if experts in block.children():
                    keep_choices(block)
                    keep_float32(cast(nn.Module, caller), name)
                    return
        frame = frame.f_back


def _layer_name(model_key: object) -> str:
    """`experts 0`, `experts 1`, ... of a model: the same on all ranks, whatever they built before.

    Args: model_key: an object that the experts of one model alone share, its configuration.
    """
    global _last_model
    if _last_model[0]() is not model_key:
        _last_model = weakref.ref(model_key), count()
    return f"experts {next(_last_model[1])}"


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Our grouped products for experts on one rank; shapes as of `ConvertedExperts.forward`. Raises:
    UserError for experts of several ranks, and for those that `convert` leaves alone."""
    layer = experts.__dict__.get(_ALONE) or _alone(experts)
    # Read in each call, because adapters parametrize weights during a forward.
    weights = {name: getattr(experts, name) for name in layer.expert_names()}
    with during(weights={**weights, **now.weights}):
        return type(layer).forward(layer, hidden_states, top_k_index, top_k_weights)


def _alone(experts: Any) -> ConvertedExperts:
    """Experts on one rank as a layer of this library: an attribute of theirs, no module of the model, without
    parameters. Raises: UserError."""
    own = type(experts).__bases__[0] if is_parametrized(experts) else type(experts)
    layer: Any = object.__new__(own)
    modules = {name: m for name, m in experts._modules.items() if name != "parametrizations"}
    tensors = {name: getattr(experts, name) for name in ConvertedExperts.expert_names(experts)}
    layer.__dict__ = {**experts.__dict__, "_modules": modules, "_parameters": tensors}
    why = "experts on several ranks" if experts._is_expert_parallel else reason_against(layer)
    if why:
        raise UserError(
            f"experts_implementation={NAME!r} of {class_name(layer)}", got=why,
            expected="plain weights of all experts on each rank",
            do=f"leave it out; for several ranks there is ep_implementation={NAME!r}",
        )  # fmt: skip
    expert_parallel(layer, Groups())._parameters = {}
    experts.__dict__ |= {_ALONE: layer, "takes_weights": True}
    _keep_routing(experts)
    return layer


def _before_a_trace(model: nn.Module) -> None:
    for module in model.modules():
        kernel = getattr(getattr(module, "config", None), "_experts_implementation", None)
        is_ready = isinstance(module, ExpertLayer) or _ALONE in module.__dict__
        if kernel == NAME and has_interface(module) and not is_ready:
            _alone(module)


EPImplementationInterface.register(NAME, LancetEP)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
BEFORE_A_TRACE.append(_before_a_trace)
