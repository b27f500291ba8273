"""`MoELayer`: a drop-in Mixture-of-Experts feed-forward, expert-parallel over a process group.

T  tokens on this rank      E  experts in all       W  ranks, L = E / W experts on each
D  d_model                  F  d_ff                 K  top_k      C  capacity

`CheckpointedRun` keeps the choices of the first run of a block inside `torch.utils.checkpoint` for its
recomputation in the backward. A router need not choose twice alike: scores can be equal, sums be taken in
another order, noise be drawn anew; then gradients would belong to another function. So the choices are kept,
4 bytes each, as a plan keeps them (`graph.capture.captured_graph`); for gates whose slots follow from logits,
the slots, too.

torch tells a module neither that it runs in such a block, nor which first run it repeats. Both follow from
Python's stack (torch 2.11 to 2.13); a walk over 35 frames takes 7 us (2-core CPU, 2026-11-26):

    use_reentrant   first run                                        second run
    True            `CheckpointFunction.forward` with its `ctx`      `CheckpointFunction.backward` with it
    False           `checkpoint` with its `_CheckpointFrame`         its `unpack_hook` with it

The choices are an attribute of that object, and are freed with the autograd graph. Other implementations of
checkpointing (DeepSpeed's, say) are not recognized.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.layer.expert_layer import (
    ExpertLayer,
    Weights,
    check_data_parallel,
    check_factory,
    check_input,
    check_sizes,
)
from lancet_kernels.layer.expert_states import ExpertsByGlobalId
from lancet_kernels.ops.base import cast, now
from lancet_kernels.ops.comm.groups import AnyGroups, group_name
from lancet_kernels.ops.comm.waiting import enter_layer
from lancet_kernels.ops.moe.eager_experts import eager_experts
from lancet_kernels.ops.moe.expert_ops import activate, input_width
from lancet_kernels.ops.moe.gates import Gate, parse_gate
from lancet_kernels.ops.moe.router import RoutingSums

_FILE = torch.utils.checkpoint.__file__
_KEPT = "lancet_first_run"
"""Attribute of a block: what layers computed in its first run."""

T = TypeVar("T")


class CheckpointedRun:
    """A run inside at least one block.

    first: the blocks that run for the first time. again: the innermost block around them that is recomputed;
    None: there is none.
    """

    def __init__(self, first: list[Any], again: Any | None) -> None:
        self.first, self.again = first, again

    def repeats(self, layer: nn.Module) -> bool:
        """Whether it is a recomputation, and the layer kept something in the first run."""
        return layer in getattr(self.again, _KEPT, {})

    def as_at_first(self, layer: nn.Module, value: T) -> T:
        """The value; in a recomputation, the one of the first run."""
        if self.repeats(layer):
            kept = getattr(self.again, _KEPT)
            # Each backward runs a block again once, from its start.
            this_time = layer, torch._C._current_graph_task_id()
            value = next(kept.setdefault(this_time, iter(kept[layer])), value)
        for block in self.first:
            if not hasattr(block, _KEPT):
                setattr(block, _KEPT, {})
            getattr(block, _KEPT).setdefault(layer, []).append(value)
        return value


def checkpointed_run(x: Tensor) -> CheckpointedRun | None:
    """The checkpointed blocks that this thread is in; None outside of them, and where x is traced."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return None
    first: list[Any] = []
    frame = sys._getframe()
    while frame.f_back is not None:  # the innermost first
        frame = frame.f_back
        if frame.f_code.co_filename != _FILE:
            continue
        name, values = frame.f_code.co_name, frame.f_locals
        if name == "backward":
            return CheckpointedRun(first, values.get("ctx"))
        if name == "unpack_hook":
            return CheckpointedRun(first, values.get("frame"))
        if name == "forward" and "ctx" in values:
            first.append(values["ctx"])
        elif name == "checkpoint" and "gen" in values:
            first.append(values["gen"].gi_frame.f_locals["new_frame"])
    return CheckpointedRun(first, None) if first else None


class MoELayer(ExpertLayer, ExpertsByGlobalId):
    """Experts behind a gate: x[..., D] -> [..., D], each token through K of E experts.

    Experts are divided among the ranks of `groups`; everything else is replicated. `ops.comm.groups` says
    which gradients are summed over which ranks. Without torch.distributed the process has all experts.

    Args:
        d_model, d_ff: model width D, hidden width F of each expert.
        num_experts: E over all ranks; the group size must divide it.
        top_k: experts per token.
        gate: a name of `lancet_kernels.ops.moe.gates.GATES`, a name with options such as
            ``"topk(renormalize=True)"``, or a `Gate`.
        capacity_factor: each rank may send ``C = ceil(capacity_factor * T * K / E)`` tokens to an expert,
            the others are dropped (contribute zero); None: dropless.
        activation: "gelu", "silu", "swiglu" or, unless fused, "clamped-swiglu" (that of GPT-OSS) and
            "interleaved-clamped-swiglu", with gate and up in alternate columns.
        bias: biases in the experts (and the shared expert).
        backend: "torch": collectives of `groups` and grouped GEMMs. "fused": persistent Triton kernels in
            which GEMM tiles and one-sided puts share one launch (GPUs; or the CPU with TRITON_INTERPRET=1,
            for proof not speed). Every pass of a fused layer is collective. One rank, which has nothing to
            overlap, runs grouped GEMMs.
        timeout, max_tokens, receive_factor: only for "fused". Seconds that a rank waits for a peer (None: as
            the group's collectives); the most tokens of any pass on a rank, for which memory is allocated
            once (None: those of the first pass; a larger one allocates anew, on all ranks at the same pass);
            room for received rows as a multiple of the even share (None: 1.25 on average over the passes
            that wait for their backward, and up to 8 in one; see `memory`).
        shared_expert_d_ff: hidden width of a shared expert, which processes every token; None: without one.
        groups: the ranks that share the experts: a process group, all groups of the job as `Groups`, or a
            DeviceMesh of one dimension, or with a dimension "expert" (and "replica", along which ranks hold
            the same experts). None: all ranks.
        device, dtype: of the parameters. The router is computed in float32 or wider, for every dtype.

    Memory of a fused layer, and what it sends: see `LayerExchange`. Under activation checkpointing (either
    kind) only the layer's input is kept, and no memory for received rows is held until the backward.

    Activation checkpointing keeps the choices of each token (`CheckpointedRun`): the second run routes as the
    first did, whatever the router gives.

    Losses: ``forward(x, return_sums=True)`` also returns the layer's `RoutingSums`, plain tensors.
    Nothing is stored on the module, so `torch.compile(fullgraph=True)` and activation checkpointing see
    no side effect. Give the sums of all layers to `moe_losses` (one small all-reduce for all of them)
    and add ``losses.balance.mean()`` to the loss with your coefficient.

    Keys: gate "hash" routes by token id, so pass `token_ids`; without them the position is used as the
    id. Gate "random" changes its routing when `routing_step` changes (`set_routing_step`), so recomputing
    a step gives the same routing.

    Checkpoints: in ``state_dict()`` the experts appear one by one under their global ids,
    ``experts.7.w1``, as views of the parameters, and what an optimizer keeps of them are DTensors in its
    ``state_dict()``. So torch.distributed.checkpoint saves each expert once and loads it at any number of
    ranks.
    """

    correction_bias: Tensor | None
    routing_step: Tensor
    equal_on_all_ranks: ClassVar[tuple[str, ...]] = ("router", "gate", "shared_up", "shared_down")

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        top_k: int = 1,
        gate: str | Gate = "switch",
        capacity_factor: float | None = 1.25,
        activation: str = "gelu",
        bias: bool = False,
        shared_expert_d_ff: int | None = None,
        backend: str = "torch",
        timeout: float | None = None,
        max_tokens: int | None = None,
        receive_factor: float | None = None,
        groups: AnyGroups | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate = parse_gate(gate) if isinstance(gate, str) else gate
        self._set_groups(groups)
        # Whose tokens are numbered through, for gates that are keyed by the token's global index.
        # An expert group alone does not say which ranks have tokens of their own: then all have.
        self._data_group = group_name(None) if self.groups is None else self.groups.data
        check_sizes(self.gate, d_model, d_ff, num_experts, top_k, shared_expert_d_ff)
        self.gate.check_capacity_factor(capacity_factor)
        check_factory(device, dtype)
        self.top_k = top_k
        self._set_up(
            d_model, d_ff, num_experts, activation, backend, capacity_factor,
            timeout=timeout, max_tokens=max_tokens, receive_factor=receive_factor,
        )  # fmt: skip
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = input_width(activation, d_ff)
        self.router = (
            nn.Parameter(torch.empty(num_experts, d_model, **factory)) if self.gate.uses_logits else None
        )
        self.w1 = nn.Parameter(torch.empty(self.local_experts, d_model, hidden, **factory))
        self.w2 = nn.Parameter(torch.empty(self.local_experts, d_ff, d_model, **factory))
        self.b1 = nn.Parameter(torch.empty(self.local_experts, hidden, **factory)) if bias else None
        self.b2 = nn.Parameter(torch.empty(self.local_experts, d_model, **factory)) if bias else None
        self.shared_up: nn.Linear | None = None
        self.shared_down: nn.Linear | None = None
        if shared_expert_d_ff is not None:
            shared_hidden = input_width(activation, shared_expert_d_ff)
            self.shared_up = nn.Linear(d_model, shared_hidden, bias=bias, **factory)
            self.shared_down = nn.Linear(shared_expert_d_ff, d_model, bias=bias, **factory)
        if self.gate.uses_correction_bias:
            bias_E = torch.zeros(num_experts, device=device, dtype=torch.float32)
            self.register_buffer("correction_bias", bias_E)
            self.register_load_state_dict_pre_hook(_widen_correction_bias)
        else:
            self.correction_bias = None
        if self.gate.key == "index":
            self.register_buffer("routing_step", torch.zeros((), dtype=torch.int64, device=device))
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        """As every module, but the correction bias stays float32: small updates are lost in 16 bits."""
        bias_E = self.correction_bias
        super()._apply(fn, recurse)
        applied_E = self.correction_bias
        if bias_E is not None and applied_E is not None and applied_E.dtype.itemsize < 4:
            self.correction_bias = bias_E.to(applied_E.device)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal(0, 0.02) weights, zero biases and buffers. Experts' values depend on global ids, not on the
        ranks."""
        if isinstance(self.w1, FakeTensor):
            return  # Nothing to fill, and no number to read from a generator.
        if self.correction_bias is not None:
            self.correction_bias.zero_()
        if self.gate.key == "index":
            self.routing_step.zero_()
        # One number from the default generator, so that ranks that were seeded alike stay alike.
        seed = int(torch.randint(2**62, (), device="cpu"))
        for name in self.expert_names():
            parameter = getattr(self, name)
            if parameter.is_meta:
                continue
            for local in range(self.local_experts):
                if name in ("b1", "b2"):
                    parameter[local].zero_()
                    continue
                expert = self.rank * self.local_experts + local
                generator = torch.Generator(parameter.device)
                generator.manual_seed((seed + 2 * expert + (name == "w2")) % 2**63)
                parameter[local].normal_(0.0, 0.02, generator=generator)
        if self.router is not None:
            self.router.normal_(0.0, 0.02)
        for linear in (self.shared_up, self.shared_down):
            if linear is not None:
                linear.weight.normal_(0.0, 0.02)
                if linear.bias is not None:
                    linear.bias.zero_()

    def capacity(self, num_tokens: int) -> int:
        """C for T tokens on this rank: ceil(capacity_factor * T * K / E), at least 1; T if dropless."""
        return self._capacity(num_tokens, self.top_k)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        return_sums: bool = False,
        logits_TE: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, RoutingSums]:
        """x [..., D] -> [..., D], and optionally the layer's RoutingSums.

        Args:
            x: any number of tokens, which may differ between ranks.
            mask: bool or integers, shaped like x without its last dimension: true or 1 for a token, false or
                0 for padding, as a tokenizer's `attention_mask`. Padding takes no slot, is not sent, and
                does not count in the sums; the experts give zero for it (a shared expert processes it). The
                capacity is that of all T. None: no padding.
            token_ids: int64 or int32, shaped like x without its last dimension; only gate "hash" uses it.
            logits_TE: router output that another module computed, in place of the layer's own router.
        NaN and infinity are no errors: they reach the loss, and so the gradients of all ranks, where a
        GradScaler finds them (where only experts are trained: on ranks whose experts got such a token).
        Raises: UserError (wrong shape or dtype, ranks that disagree), CommunicationError.
        """
        mask = now.padding_mask if mask is None else mask
        check_input(x, mask, token_ids, self.d_model, self.w1.dtype)
        check_data_parallel(self)
        if not torch.compiler.is_compiling():
            enter_layer(self.name)
        run = checkpointed_run(x)
        real_T1 = None if mask is None else mask.reshape(-1, 1).to(torch.bool)
        if run is not None:
            real_T1 = run.as_at_first(self, real_T1)
        x_TD = x.reshape(-1, self.d_model)
        num_tokens = x_TD.shape[0]
        capacity = self.capacity(num_tokens)
        if logits_TE is not None:
            logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        elif self.router is not None:
            logits_TE = ops.router_logits(x_TD, self.router)
        used_E = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        key_T, bias_E = self._keys(x_TD, token_ids), self.correction_bias
        # `eager_experts` assigns slots in the order of tokens.
        weights = None if self._slots_follow_logits() else self._eager_weights(x_TD)
        if weights is not None:
            expert_TK = self._select(run, logits_TE, key_T, bias_E)
            weight_TK = self.gate.weights(logits_TE, expert_TK, torch.float32)
            y_TD, used_out_E = eager_experts(
                x_TD, expert_TK, weight_TK, *weights,
                self.num_experts, self.activation, self.expert_group, real_T1,
            )  # fmt: skip
        else:
            if run is None:
                expert_TK, slot_TK, weight_TK, used_out_E = ops.gate(
                    logits_TE, used_E, key_T, bias_E, str(self.gate), self.top_k, capacity, real_T1
                )
            else:
                expert_TK = self._select(run, logits_TE, key_T, bias_E)
                with torch.no_grad():
                    slots = self.gate.assign_slots(logits_TE, expert_TK, used_E, capacity, real_T1)
                slot_TK, used_out_E = run.as_at_first(self, slots) if self._slots_follow_logits() else slots
                weight_TK = self.gate.weights(logits_TE, expert_TK, torch.float32)
            y_TD = self._experts(cast(x_TD), expert_TK, slot_TK, weight_TK, used_out_E, capacity, real_T1)
        shared_TD = self._shared_expert(x_TD)
        y_TD = y_TD if shared_TD is None else y_TD + shared_TD
        # No view outside of graphs, as of nn.Linear: one that is written into loses the hook of FSDP on it.
        is_graph = torch.compiler.is_compiling()
        y = y_TD.view(x.shape) if is_graph else torch.ops.aten._unsafe_view(y_TD, x.shape)
        if not return_sums:
            return y
        return y, ops.routing_sums(self.gate, logits_TE, used_E, used_out_E, capacity, num_tokens, real_T1)

    @torch.no_grad()
    def _select(
        self,
        run: CheckpointedRun | None,
        logits_TE: Tensor | None,
        key_T: Tensor | None,
        bias_E: Tensor | None,
    ) -> Tensor:
        """The experts of each token, int64 [T, K]; in a recomputation those of the first run, which selects
        anyway, because selective checkpointing counts ops."""
        expert_TK = self.gate.select(logits_TE, key_T, bias_E, self.num_experts, self.top_k)
        expert_TK = self.gate.checked(expert_TK, self.num_experts, self.top_k)
        return expert_TK if run is None else run.as_at_first(self, expert_TK.int()).long()

    def _slots_follow_logits(self) -> bool:
        """False: slots follow from the choices alone, in the order of tokens."""
        return type(self.gate).assign_slots is not Gate.assign_slots

    def weights(self) -> Weights:
        return self._present("w1"), self._present("b1"), self._present("w2"), self._present("b2")

    def _shared_expert(self, x_TD: Tensor) -> Tensor | None:
        """Output of the shared expert, [T, D]; None without one."""
        if self.shared_up is None or self.shared_down is None:
            return None
        return self.shared_down(activate(self.shared_up(x_TD), self.activation))

    def _keys(self, x_TD: Tensor, token_ids: Tensor | None) -> Tensor | None:
        """The keys of a keyed gate, int64 [T]: token ids, or global indices mixed with the step."""
        if self.gate.key is None:
            return None
        if self.gate.key == "token" and token_ids is not None:
            # The hash is 64 bits wide; int32 would wrap and route otherwise.
            return token_ids.reshape(-1).to(torch.int64)
        index_T = ops.token_index(x_TD.shape[0], self._data_group, x_TD.device)
        return index_T + self.routing_step * (1 << 40) if self.gate.key == "index" else index_T

    @torch.no_grad()
    def update_correction_bias(self, assigned_E: Tensor, rate: float) -> None:
        """After a step, push under-used experts up and over-used ones down (DeepSeek-V3, section 2.1.2).

        Args: assigned_E: assignments over all ranks (`MoELosses.assigned[layer]`), so that ranks stay equal.
        """
        bias_E = self.correction_bias
        if bias_E is None:
            raise UserError(
                "gate", got=self.gate.name, expected="sigmoid", do="only that gate has a correction bias"
            )
        load_E = assigned_E.to(bias_E.dtype)
        bias_E += rate * torch.sign(load_E.mean() - load_E)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_ff={self.d_ff}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"gate={self.gate}, capacity_factor={self.capacity_factor}, activation={self.activation}, "
            f"backend={self.backend}, "
            f"experts {self.expert_ids().start} to {self.expert_ids().stop - 1} here"
        )


def _widen_correction_bias(_layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Convert that of a checkpoint in 16 bits to float32, also for `load_state_dict(assign=True)`."""
    if (name := f"{prefix}correction_bias") in state_dict:
        state_dict[name] = state_dict[name].to(torch.float32)
