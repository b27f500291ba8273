"""transformers' expert parallelism on the ops of this library: registers `ep_implementation="lancet"`.

    import lancet_kernels.transformers.expert_parallel  # registers it
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=8, ep_size=4, ep_implementation="lancet")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)

For every architecture whose expert plan has an `ep_dispatch_experts` rule. Parameters stay as transformers
shards them: whole experts per rank of the expert group, FSDP over the ranks that hold the same experts.

    T  tokens on this rank, or its slice of those of a tensor-parallel group      D  model width
    K  choices per token    E  experts in all    W  ranks, L experts on each
    R  rows received, by local expert, then source rank (`ops.comm.rows`)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.activation_names import INTERLEAVED
from lancet_kernels.ops.comm.groups import EXPERT_GROUP, FORWARD_OF, group_name
from lancet_kernels.ops.comm.waiting import enter_layer
from lancet_kernels.ops.moe.expert_activation import CLAMP, SLOPE

try:
    from transformers.activations import SiLUActivation
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    from transformers.integrations.moe import _default_apply_gate
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
except ImportError as error:
    raise ImportError(
        f"lancet_kernels.transformers.expert_parallel: got {error}, expected transformers' expert "
        "parallelism; pip install 'transformers>=5.23' accelerate"
    ) from error

NAME = "lancet"
_ANY_KERNEL = (None, "eager", "batched_mm", "grouped_mm")
"""Values of `experts_implementation` in place of which our grouped GEMMs run; others name a kernel."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_last_model: tuple[Callable[[], object], count] = (lambda: None, count())
"""A weak reference to the configuration of the model that was sharded last, and the numbers of its layers."""


class LancetEP(EPImplementation):
    """Sends each (token, choice) to the rank of its expert and back: compact rows, counts first.

    Experts with plain weights (up or gate and up, down, perhaps biases) run as grouped GEMMs on the rows
    where they lie; others run their own forward.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.local_experts: int = experts.num_experts
        self.group, self.ranks = group_name(ep_mesh.get_group()), ep_mesh.size()
        self.slices = tp_mesh.size()
        setattr(experts, EXPERT_GROUP, self.group)
        setattr(experts, FORWARD_OF, self.forward_of)
        self.name = _layer_name(experts)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, D], top_k_index [T, K] (of E), top_k_weights [T, K] -> [T, D].

        Raises: UserError (ranks that disagree), CommunicationError.
        """
        if not torch.compiler.is_compiling():
            enter_layer(self.name)
        # All ranks of a tensor-parallel group have these tokens, and each sends a slice of them.
        tokens = len(hidden_states)
        x_TD, expert_TK, weight_TK = (
            self._redistributed(tensor, Replicate(), Shard(0), tokens)
            for tensor in (hidden_states, top_k_index, top_k_weights)
        )
        if torch.is_autocast_enabled(x_TD.device.type):  # which does not know our ops
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        choices = expert_TK.numel()
        order_N = expert_TK.reshape(-1).argsort(stable=True)
        row_TK = torch.empty_like(order_N).index_copy_(0, order_N, torch.arange(choices, device=x_TD.device))
        row_TK = row_TK.view_as(expert_TK)
        count_E = order_N.new_zeros(self.ranks * self.local_experts)
        count_E = count_E.index_add(0, expert_TK.reshape(-1), torch.ones_like(order_N))
        count_WL = count_E.view(self.ranks, -1)
        received_WL = ops.exchange_counts(count_WL, x_TD.shape[1], x_TD.dtype, self.group)
        sent_SD = ops.dispatch(x_TD, row_TK, None, choices, choices)
        rows_RD = ops.all_to_all(sent_SD, count_WL, received_WL, self.group, True)
        rows_RD = self._run(rows_RD, received_WL)
        back_SD = ops.all_to_all(rows_RD, received_WL, count_WL, self.group, False, choices)
        y_TD = ops.combine(back_SD, row_TK, weight_TK)
        return self._redistributed(y_TD, Shard(0), Replicate(), tokens)

    def forward_of(self, experts: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The forward of another module with the same experts, to be captured.

        Raises: UserError for experts that compute with other ops than ours: the number of their rows would
            become a constant of the graph.
        """
        if not (has_plain_weights(self.experts) and activation_of(self.experts)):
            raise UserError(
                f"experts {type(self.experts).__name__}",
                got="an activation, weights or a kernel of their own",
                expected="plain weights, and silu(gate) * up or the activation of GPT-OSS",
                do="train without optimize()",
            )
        own = copy.copy(self)
        own.experts = experts

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return own(hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)

        return forward

    def _run(self, rows_RD: Tensor, count_WL: Tensor) -> Tensor:
        """The experts of this rank on their rows. -> [R, D]"""
        experts = self.experts
        if not has_plain_weights(experts):
            return self._run_own_forward(rows_RD, count_WL)
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        hidden = ops.grouped_gemm(rows_RD, count_WL, *self._weights(up, rows_RD))
        if activation := activation_of(experts):
            hidden = ops.expert_activation(hidden, count_WL, activation)
        else:
            hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        return ops.grouped_gemm(hidden, count_WL, *self._weights("down_proj", rows_RD))

    def _weights(self, name: str, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights [L, in, out] and biases [L, out] in the dtype of the rows, which may be autocast's."""
        weight = getattr(self.experts, name)
        weight = weight if self.experts.is_transposed else weight.transpose(1, 2)
        bias = getattr(self.experts, f"{name}_bias") if self.experts.has_bias else None
        return weight.to(like.dtype), None if bias is None else bias.to(like.dtype)

    def _run_own_forward(self, rows_RD: Tensor, count_WL: Tensor) -> Tensor:
        """The forward of the experts' module, with one expert per row and weight 1."""
        own_L = torch.arange(self.local_experts, device=rows_RD.device)
        expert_R1 = own_L.repeat_interleave(count_WL.sum(0)).unsqueeze(1)
        if len(rows_RD):
            return self.experts_forward(rows_RD, expert_R1, torch.ones_like(expert_R1, dtype=rows_RD.dtype))
        # A rank without rows runs one of zeros: its experts belong to the graph as on every rank.
        row = rows_RD.sum(0, keepdim=True)
        return self.experts_forward(row, own_L.new_zeros(1, 1), row.new_ones(1, 1))[:0]

    def _redistributed(self, tensor: Tensor, present: Placement, wanted: Placement, rows: int) -> Tensor:
        """A tensor of so many rows over the tensor-parallel group, in another placement."""
        if self.slices == 1:
            return tensor
        size = torch.Size((rows, tensor.shape[1]))
        whole = DTensor.from_local(
            tensor.contiguous(), self.tp_mesh, [present], run_check=False, shape=size, stride=(size[1], 1)
        )
        return whole.redistribute(self.tp_mesh, [wanted]).to_local()


def _layer_name(experts: nn.Module) -> str:
    """`experts 0`, `experts 1`, ... of a model: the same on all ranks, whatever each has built before."""
    global _last_model
    config = getattr(experts, "config", None)
    if config is None:
        return "experts"
    if _last_model[0]() is not config:
        _last_model = weakref.ref(config), count()
    return f"experts {next(_last_model[1])}"


def has_plain_weights(experts: nn.Module) -> bool:
    """Does the module compute what transformers' own grouped matrix products do from its weights: up (and
    gate), the activation, down, in a dtype that ours take?"""
    known = all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    if not known or getattr(experts, "has_post_expert_norm", False):
        return False
    if getattr(experts.config, "_experts_implementation", None) not in _ANY_KERNEL:
        return False
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names] if experts.has_bias else []
    weights = dict(experts.named_parameters())
    return weights.keys() == set(names) and all(weight.dtype in _DTYPES for weight in weights.values())


def activation_of(experts: nn.Module) -> str:
    """The name of the activation in `ops.expert_activation`; "" if it is none of these."""
    gate = getattr(type(experts), "_apply_gate", None)
    is_silu = isinstance(getattr(experts, "act_fn", None), (nn.SiLU, SiLUActivation))
    if experts.has_gate and experts.is_concatenated and gate is _default_apply_gate and is_silu:
        return "swiglu"
    constants = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if gate is GptOssExperts._apply_gate and constants == (SLOPE, CLAMP):
        return INTERLEAVED
    return ""


EPImplementationInterface.register(NAME, LancetEP)
