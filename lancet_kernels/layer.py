"""`MoELayer`: a drop-in Mixture-of-Experts feed-forward, expert-parallel over a process group.

T  tokens on this rank      E  experts in all       W  ranks, L = E / W experts on each
D  d_model                  F  d_ff                 K  top_k      C  capacity
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral, Real
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lancet_kernels import ops
from lancet_kernels.dropout_layer import set_dropout_step
from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture import is_fake
from lancet_kernels.kernels.activation_names import check_activation
from lancet_kernels.ops.expert_activation import activate, input_width
from lancet_kernels.ops.gates import GATES, Gate, parse_gate
from lancet_kernels.ops.groups import Groups, data_group_name, group_name, group_rank, group_size
from lancet_kernels.ops.losses import RoutingSums
from lancet_kernels.ops.waiting import enter_layer

BACKENDS = ("torch", "fused")
# Layers whose experts a DistributedDataParallel module leaves alone.
_CHECKED: WeakKeyDictionary[DistributedDataParallel, WeakSet[MoELayer]] = WeakKeyDictionary()


class MoELayer(nn.Module):
    """Experts behind a gate: x[..., D] -> [..., D], each token through K of E experts.

    Experts are split over the ranks of `group`; everything else is replicated. Which gradients are summed
    over which ranks: `ops.groups`. Without torch.distributed the one rank has all experts.

    Args:
        d_model, d_ff: model width D, hidden width F of each expert.
        num_experts: E over all ranks; the group size must divide it.
        top_k: experts per token.
        gate: a name of `lancet_kernels.ops.gates.GATES`, a spec with options such as
        ``"topk(renormalize=True)"``,
            or a `Gate`.
        capacity_factor: each rank may send ``C = ceil(capacity_factor * T * K / E)`` tokens to an expert,
            the others are dropped (contribute zero); None: dropless.
        activation: "gelu", "silu" or "swiglu". bias: biases in the experts (and the shared expert).
        backend: "torch": collectives of `group` and grouped GEMMs. "fused": persistent Triton kernels in
            which GEMM tiles and one-sided puts share one launch (GPUs; or the CPU with TRITON_INTERPRET=1,
            for proof not speed). A layer with gradients may then run forward `banks` = 2 times before the
            first backward; a fused layer's passes are collective, first one included.
        shared_expert_d_ff: hidden width of an expert that every token passes, in addition; None: none.
        group: the expert-parallel process group, or all groups of the job as `Groups`; None: all ranks.
        device, dtype: of the parameters. The router is computed in at least float32 whatever the dtype.

    Losses: ``forward(x, return_sums=True)`` also returns the layer's `RoutingSums`, plain tensors.
    Nothing is stored on the module, so `torch.compile(fullgraph=True)` and activation checkpointing see
    no side effect. Hand the sums of all layers to `moe_losses` (one small all-reduce for all of them)
    and add ``losses.balance.mean()`` to the loss with your coefficient.

    Keys: gate "hash" routes by token id, so pass `token_ids`; without them the position counts as the
    id. Gate "random" draws anew when `routing_step` changes (`set_routing_step`), so that recomputing a
    step gives the same routing.

    Checkpoints: in ``state_dict()`` the experts appear one by one under their global ids,
    ``experts.7.w1``, as views of the parameters. So torch.distributed.checkpoint saves each expert once
    and loads it at any number of ranks.
    """

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
        group: dist.ProcessGroup | Groups | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.name = "an MoE layer"  # for messages; `name_layers` knows it better
        self.gate = parse_gate(gate) if isinstance(gate, str) else gate
        self.groups = group if isinstance(group, Groups) else None
        self.expert_group = group.expert if isinstance(group, Groups) else group_name(group)
        # Whose tokens are numbered through, for gates that are keyed by the token's global index.
        self._data_group = group.data if isinstance(group, Groups) else group_name(None)
        self.ranks, self.rank = group_size(self.expert_group), group_rank(self.expert_group)
        self._check(d_model, d_ff, num_experts, top_k, capacity_factor, activation, shared_expert_d_ff)
        self.d_model, self.d_ff, self.num_experts, self.top_k = d_model, d_ff, num_experts, top_k
        self.capacity_factor, self.activation = capacity_factor, activation
        self.local_experts = num_experts // self.ranks

        if backend not in BACKENDS:
            raise UserError(
                "backend", got=repr(backend), expected=f"one of {', '.join(BACKENDS)}", do="check the name"
            )
        self.backend = backend
        self._exchange = None
        if backend == "fused":
            # Only here: the kernels need Triton, which not every machine has.
            from lancet_kernels.ops.fused_experts import LayerExchange

            self._exchange = LayerExchange(self.expert_group, self.local_experts, d_model, d_ff, activation)

        factory = {"device": device, "dtype": dtype}
        hidden = input_width(activation, d_ff)
        self.router = (
            nn.Parameter(torch.empty(num_experts, d_model, **factory)) if self.gate.uses_logits else None
        )
        self.w1 = nn.Parameter(torch.empty(self.local_experts, d_model, hidden, **factory))
        self.w2 = nn.Parameter(torch.empty(self.local_experts, d_ff, d_model, **factory))
        self.b1 = nn.Parameter(torch.empty(self.local_experts, hidden, **factory)) if bias else None
        self.b2 = nn.Parameter(torch.empty(self.local_experts, d_model, **factory)) if bias else None
        self.shared_up = self.shared_down = None
        if shared_expert_d_ff is not None:
            shared_hidden = input_width(activation, shared_expert_d_ff)
            self.shared_up = nn.Linear(d_model, shared_hidden, bias=bias, **factory)
            self.shared_down = nn.Linear(shared_expert_d_ff, d_model, bias=bias, **factory)
        if self.gate.uses_correction_bias:
            self.register_buffer("correction_bias", torch.zeros(num_experts, device=device))
        else:
            self.correction_bias = None
        if self.gate.key == "index":
            self.register_buffer("routing_step", torch.zeros((), dtype=torch.int64, device=device))
        self.reset_parameters()

    def _check(self, d_model, d_ff, num_experts, top_k, capacity_factor, activation, shared_d_ff) -> None:
        if not isinstance(self.gate, Gate):
            raise UserError(
                "gate", got=repr(self.gate), expected=f"one of {', '.join(GATES)}, or a Gate", do="name one"
            )
        sizes = {"d_model": d_model, "d_ff": d_ff, "num_experts": num_experts, "top_k": top_k}
        if shared_d_ff is not None:
            sizes["shared_expert_d_ff"] = shared_d_ff
        for what, value in sizes.items():
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise UserError(what, got=repr(value), expected="a whole number", do="give an int")
            if value < 1 and what in ("d_model", "d_ff", "num_experts"):
                raise UserError(what, got=value, expected="at least 1", do="give a positive size")
        if shared_d_ff is not None and shared_d_ff < 1:
            raise UserError(
                "shared_expert_d_ff", got=shared_d_ff, expected="at least 1 or None", do="leave it out"
            )
        if num_experts % self.ranks:
            raise UserError(
                "num_experts",
                got=num_experts,
                expected=f"a multiple of the {self.ranks} ranks of the group",
                do="change the number of experts or of ranks",
            )
        if capacity_factor is not None and not (
            isinstance(capacity_factor, Real)
            and not isinstance(capacity_factor, bool)
            and capacity_factor > 0
            and math.isfinite(capacity_factor)
        ):
            raise UserError(
                "capacity_factor",
                got=repr(capacity_factor),
                expected="a positive number, or None for dropless",
                do="use 1.25, say",
            )
        check_activation(activation)
        self.gate.check(num_experts, top_k)
        self.gate.check_capacity_factor(capacity_factor)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal(0, 0.02) weights, zero biases. An expert's values depend on its global id, not on the
        ranks."""
        if is_fake(self.w1):
            return  # Nothing to fill, and no number to read from a generator.
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
        if self.capacity_factor is None:
            return num_tokens
        return max(1, math.ceil(self.capacity_factor * num_tokens * self.top_k / self.num_experts))

    def forward(
        self, x: Tensor, *, token_ids: Tensor | None = None, return_sums: bool = False
    ) -> Tensor | tuple[Tensor, RoutingSums]:
        """x [..., D] -> [..., D], and the layer's RoutingSums if asked for.

        Args:
            x: any number of tokens, also another one on each rank.
            token_ids: int64 or int32, shaped like x without its last dimension; only gate "hash" looks at it.
        Raises: UserError (wrong shape or dtype, NaN in the router, ranks that disagree), CommunicationError.
        """
        self._check_input(x, token_ids)
        self.check_data_parallel()
        if not torch.compiler.is_compiling():
            enter_layer(self.name)
        x_TD = x.reshape(-1, self.d_model)
        num_tokens = x_TD.shape[0]
        capacity = self.capacity(num_tokens)
        logits_TE = self._logits(x_TD)
        used_E = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        expert_TK, slot_TK, weight_TK, used_out_E = ops.gate(
            logits_TE,
            used_E,
            self._keys(x_TD, token_ids),
            self.correction_bias,
            str(self.gate),
            self.top_k,
            capacity,
        )
        count_WL = ops.kept_counts(used_out_E, capacity, self.ranks)
        y_TD = self._experts(self._cast(x_TD), expert_TK, slot_TK, weight_TK, count_WL, capacity)
        if self.shared_up is not None:
            y_TD = y_TD + self.shared_down(activate(self.shared_up(x_TD), self.activation))
        y = y_TD.view(x.shape)
        if not return_sums:
            return y
        return y, ops.routing_sums(self.gate, logits_TE, used_E, used_out_E, capacity, num_tokens)

    def _experts(self, x_TD, expert_TK, slot_TK, weight_TK, count_WL, capacity: int) -> Tensor:
        """dispatch -> all-to-all -> experts -> all-to-all -> combine. -> [T, D]."""
        # Captured for a plan, a layer shows its ops; the plan says which of them are fused.
        if self._exchange is not None and not torch.compiler.is_compiling():
            from lancet_kernels.ops.fused_experts import fused_experts

            parameters = (self._cast(p) for p in (self.w1, self.b1, self.w2, self.b2))
            return fused_experts(
                x_TD, expert_TK, slot_TK, weight_TK, count_WL, capacity, *parameters, self._exchange
            )
        row_TK = ops.send_rows(expert_TK, slot_TK, count_WL)
        received_WL = ops.exchange_counts(count_WL, self.d_model, x_TD.dtype, self.expert_group)
        num_choices = row_TK.numel()
        most_rows = self._most_rows(num_choices, capacity)
        num_rows = num_choices if self.capacity_factor is None else None
        sent_SD = ops.dispatch(x_TD, row_TK, None, most_rows, num_rows)
        rows_RD = self._all_to_all(sent_SD, count_WL, received_WL, True)
        hidden_RH = ops.grouped_gemm(rows_RD, received_WL, self._cast(self.w1), self._cast(self.b1))
        hidden_RF = ops.expert_activation(hidden_RH, received_WL, self.activation)
        rows_RD = ops.grouped_gemm(hidden_RF, received_WL, self._cast(self.w2), self._cast(self.b2))
        back_SD = self._all_to_all(rows_RD, received_WL, count_WL, False, sent_SD.shape[0])
        return ops.combine(back_SD, row_TK, weight_TK)

    def _most_rows(self, num_choices: int, capacity: int) -> int:
        """Of these choices, how many can be kept."""
        return min(num_choices, self.num_experts * capacity)

    def _all_to_all(self, rows, send_count_WL, receive_count_WL, to_experts, num_rows=None) -> Tensor:
        """Rows to the experts, or back. One rank's rows need no copy; only graphs show the instruction."""
        if not self.expert_group and not torch.compiler.is_compiling():
            return rows
        return ops.all_to_all(rows, send_count_WL, receive_count_WL, self.expert_group, to_experts, num_rows)

    def _logits(self, x_TD: Tensor) -> Tensor | None:
        """Router output [T, E] in float32, in float64 for a float64 model; autocast has no say."""
        if self.router is None:
            return None
        dtype = torch.promote_types(self.router.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            return nn.functional.linear(x_TD.to(dtype), self.router.to(dtype))

    def _keys(self, x_TD: Tensor, token_ids: Tensor | None) -> Tensor | None:
        """What a keyed gate routes by, int64 [T]: token ids, or the token's global index mixed with the
        step."""
        if self.gate.key is None:
            return None
        if self.gate.key == "token" and token_ids is not None:
            # The hash is 64 bits wide; int32 would wrap and route otherwise.
            return token_ids.reshape(-1).to(torch.int64)
        index_T = ops.token_index(x_TD.shape[0], self._data_group, x_TD.device)
        return index_T + self.routing_step * (1 << 40) if self.gate.key == "index" else index_T

    def _cast(self, tensor: Tensor | None) -> Tensor | None:
        """To autocast's dtype where autocast is on: it does not know our ops."""
        if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
            return tensor
        return tensor.to(torch.get_autocast_dtype(tensor.device.type))

    def _check_input(self, x: Tensor, token_ids: Tensor | None) -> None:
        for what, value in (("input", x), ("token_ids", token_ids)):
            if not isinstance(value, Tensor) and not (what == "token_ids" and value is None):
                raise UserError(
                    f"{what} of MoELayer",
                    got=f"a {type(value).__name__}",
                    expected="a tensor",
                    do="give a torch.Tensor",
                )
        if x.dim() < 1 or x.shape[-1] != self.d_model:
            raise UserError(
                "input of MoELayer",
                got=f"shape {list(x.shape)}",
                expected=f"[..., {self.d_model}]",
                do="make the last dimension d_model",
            )
        if x.dtype != self.w1.dtype and not torch.is_autocast_enabled(x.device.type):
            raise UserError(
                "input of MoELayer",
                got=x.dtype,
                expected=f"{self.w1.dtype} (the dtype of its parameters)",
                do="convert one of them, or use torch.autocast",
            )
        if token_ids is not None and token_ids.dtype not in (torch.int64, torch.int32):
            raise UserError(
                "token_ids of MoELayer",
                got=token_ids.dtype,
                expected="int64 or int32",
                do="give the ids that the embedding gets",
            )
        if token_ids is not None and token_ids.shape != x.shape[:-1]:
            raise UserError(
                "token_ids of MoELayer",
                got=f"shape {list(token_ids.shape)}",
                expected=list(x.shape[:-1]),
                do="give one id per token",
            )

    def check_data_parallel(self) -> None:
        """Raise UserError inside a DistributedDataParallel that would average different experts."""
        if torch.compiler.is_compiling() or not self.expert_group:
            return
        around = DistributedDataParallel._active_ddp_module
        if around is None or self in _CHECKED.setdefault(around, WeakSet()):
            return
        names = {p: name for name, p in around.module.named_parameters()}
        for own in self.expert_names():
            name = names.get(getattr(self, own))
            if name is not None and name not in around.parameters_to_ignore:
                raise UserError(
                    "DistributedDataParallel around an MoELayer",
                    got=f"{name} among the parameters that it averages over all ranks",
                    expected="experts of which each rank has its own",
                    do="make the model anew (experts were overwritten) and wrap it with lancet_kernels.ddp",
                )
        _CHECKED[around].add(self)

    @torch.no_grad()
    def update_correction_bias(self, assigned_E: Tensor, rate: float) -> None:
        """After a step, push under-used experts up and over-used ones down (DeepSeek-V3, section 2.1.2).

        Args: assigned_E: assignments over all ranks (`MoELosses.assigned[layer]`), so that ranks stay equal.
        """
        if self.correction_bias is None:
            raise UserError(
                "gate", got=self.gate.name, expected="sigmoid", do="only that gate has a correction bias"
            )
        load_E = assigned_E.to(self.correction_bias.dtype)
        self.correction_bias += rate * torch.sign(load_E.mean() - load_E)

    def expert_names(self) -> Iterator[str]:
        """Names of the parameters [L, ...] that hold the experts of this rank."""
        return (name for name in ("w1", "b1", "w2", "b2") if getattr(self, name) is not None)

    def expert_ids(self) -> range:
        """Global ids of the experts on this rank."""
        return range(self.rank * self.local_experts, (self.rank + 1) * self.local_experts)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.expert_names():
            stacked = destination.pop(prefix + name)
            for local, expert in enumerate(self.expert_ids()):
                destination[f"{prefix}experts.{expert}.{name}"] = stacked[local]

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        not_stacked = []
        for name in self.expert_names():
            keys = [f"{prefix}experts.{expert}.{name}" for expert in self.expert_ids()]
            if all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
            elif prefix + name not in state_dict:
                not_stacked.append(prefix + name)
                missing_keys += [key for key in keys if key not in state_dict]
                # Known, so not unexpected; an incomplete parameter stays as it is.
                for key in keys:
                    state_dict.pop(key, None)
        # A full checkpoint also has the other ranks' experts: not ours to load, not unexpected either.
        for key in [k for k in state_dict if k.startswith(prefix + "experts.")]:
            expert = key.removeprefix(prefix + "experts.").split(".")[0]
            if expert.isdigit() and int(expert) < self.num_experts and int(expert) not in self.expert_ids():
                del state_dict[key]
        own_missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, own_missing, unexpected_keys, error_msgs
        )
        # Under their global names they are told already.
        missing_keys += [key for key in own_missing if key not in not_stacked]

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_ff={self.d_ff}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"gate={self.gate}, capacity_factor={self.capacity_factor}, activation={self.activation}, "
            f"backend={self.backend}, "
            f"experts {self.expert_ids().start} to {self.expert_ids().stop - 1} here"
        )


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """All MoE layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def name_layers(model: nn.Module) -> None:
    """Let messages about a failed collective name each MoE layer of a model as the model does."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            module.name = name or module.name


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that differ between the ranks of an expert group: all-reduce their gradients over the
    replica group alone.

    Found through the layers, not by a mark on the parameter, which a copy of the model would lose.
    """
    return [getattr(layer, name) for layer in moe_layers(model) for name in layer.expert_names()]


def set_routing_step(model: nn.Module, step: int) -> None:
    """Tell what draws random numbers in a model, its random gates and `Dropout`s, which training step it is.

    Raises: UserError if two dropouts have the same call site.
    """
    set_dropout_step(model, step)
    for layer in moe_layers(model):
        if layer.gate.key == "index":
            layer.routing_step.fill_(step)


def moe_losses(sums: list[RoutingSums], group: dist.ProcessGroup | Groups | None = None) -> ops.MoELosses:
    """Load-balance loss, z-loss and statistics of the layers whose sums are given (see `ops.losses`).

    Collective over `group`, all ranks with different tokens (None: all ranks): one small all-reduce.
    """
    is_list = isinstance(sums, (list, tuple)) and not isinstance(sums, RoutingSums)
    if not is_list or not sums or not all(isinstance(one, RoutingSums) for one in sums):
        wrong = next((one for one in sums if not isinstance(one, RoutingSums)), None) if is_list else sums
        raise UserError(
            "sums",
            got="none" if is_list and not sums else f"a {type(wrong).__name__}{' in the list' * is_list}",
            expected="one RoutingSums per MoE layer",
            do="call forward with return_sums=True, and give a list of what comes second",
        )
    return ops.losses.moe_losses(sums, data_group_name(group))
