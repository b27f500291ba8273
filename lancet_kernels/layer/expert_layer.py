"""The expert part of an MoE layer: tokens with their choices to the experts' ranks, through them, and back.

T  tokens on this rank      E  experts in all       W  ranks, L = E / W experts on each
D  d_model                  F  d_ff                 K  choices per token        C  capacity

Before it, the checks of what an MoE layer is given: sizes in its constructor; tensors, and wrappers around
it, in its calls.
"""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from lancet_kernels import ops
from lancet_kernels.errors import UserError, check_name
from lancet_kernels.kernels.config import ACTIVATIONS, ALL_ACTIVATIONS, check_activation
from lancet_kernels.layer.expert_states import ShardedExperts
from lancet_kernels.ops.base import cast, now
from lancet_kernels.ops.comm.groups import (
    AnyGroups,
    Groups,
    expert_group_name,
    group_rank,
    group_ranks,
    group_size,
    without_mesh,
)
from lancet_kernels.ops.moe.eager_experts import runs_eagerly
from lancet_kernels.ops.moe.expert_ops import EXPRESSIONS
from lancet_kernels.ops.moe.gates import GATES, Gate

if TYPE_CHECKING:  # the kernels need Triton, which not every machine has
    from lancet_kernels.ops.moe.fused_experts import LayerMemory


AVERAGES = WeakTensorKeyDictionary()
"""By parameter, the hook that averages its gradient over the ranks with the same experts, and the name of the
group with different tokens."""
# By DistributedDataParallel module and layer, the experts that it was checked to train right.
_CHECKED: WeakKeyDictionary[DistributedDataParallel, WeakKeyDictionary[ShardedExperts, set[str]]] = (
    WeakKeyDictionary()
)


def is_number(value: object, kind: type = Real) -> bool:
    """False for a bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_sizes(
    gate: Gate, d_model: int, d_ff: int, num_experts: int, top_k: int, shared_d_ff: int | None
) -> None:
    """Raise UserError for sizes that no layer can have."""
    if not isinstance(gate, Gate):
        raise UserError(
            "gate", got=repr(gate), expected=f"one of {', '.join(GATES)}, or a Gate", do="name one"
        )
    name, kind = getattr(gate, "name", ""), type(gate)
    if GATES.get(name) is not kind:
        raise UserError(
            f"gate {kind.__name__}",
            got=f"name {name!r}, which is not that of this class in GATES",
            expected="a class that ops find by its name",
            do=f'give it a name of its own, and set GATES["..."] = {kind.__name__}',
        )
    check_name(f"key of gate {name}", gate.key or "index", ("token", "index"))
    check_name(f"score of gate {name}", gate.score, ("softmax", "sigmoid"))
    sizes = {"d_model": d_model, "d_ff": d_ff, "num_experts": num_experts, "top_k": top_k}
    if shared_d_ff is not None:
        sizes["shared_expert_d_ff"] = shared_d_ff
    for what, value in sizes.items():
        if not is_number(value, Integral):
            raise UserError(what, got=repr(value), expected="a whole number", do="give an int")
        if value < 1 and what != "top_k":
            optional = what == "shared_expert_d_ff"
            raise UserError(
                what,
                got=value,
                expected="at least 1 or None" if optional else "at least 1",
                do="leave it out" if optional else "give a positive size",
            )
    gate.check(num_experts, top_k)


def check_experts(num_experts: int, ranks: int) -> None:
    """Raise UserError unless the ranks can share the experts."""
    if num_experts % ranks:
        raise UserError(
            "num_experts",
            got=num_experts,
            expected=f"a multiple of the {ranks} ranks of the group",
            do="change the number of experts or of ranks",
        )


def check_factory(device: torch.device | str | int | None, dtype: object) -> None:
    """Raise UserError for a device that this machine lacks, and for what is no dtype of parameters."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(
            "dtype", got=repr(dtype), expected="a floating-point dtype", do="use torch.bfloat16, say"
        )
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(
            "device", got=repr(device), expected="a device of torch", do="use 'cpu' or 'cuda'"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device", got=repr(device), expected="a device that this machine has", do="use 'cpu' or 'meta'"
        )


def check_exchange_options(backend: str, **options: float | None) -> None:
    """Raise UserError unless each option of fused layers is None, or a positive number of a fused layer."""
    for name, value in options.items():
        if value is None:
            continue
        if backend != "fused":
            raise UserError(
                name,
                got=f"{value!r} with backend={backend!r}",
                expected="None",
                do="use backend='fused' for it",
            )
        kind = Integral if name == "max_tokens" else Real
        if not is_number(value, kind) or not 0 < float(value) < math.inf:
            what = "a positive whole number" if kind is Integral else "a positive number"
            raise UserError(name, got=repr(value), expected=f"{what}, or None", do="correct it")


def check_factor(capacity_factor: float | None) -> None:
    """Raise UserError unless it is a positive number or None."""
    if capacity_factor is not None and not (is_number(capacity_factor) and 0 < capacity_factor < math.inf):
        raise UserError(
            "capacity_factor",
            got=repr(capacity_factor),
            expected="a positive number, or None for dropless",
            do="use 1.25, say",
        )


def check_input(
    x: Tensor, mask: Tensor | None, token_ids: Tensor | None, d_model: int, dtype: torch.dtype
) -> None:
    """Raise UserError unless x is [..., d_model] in `dtype`, with one mask flag and one id per token."""
    for what, value in (("input", x), ("mask", mask), ("token_ids", token_ids)):
        if not isinstance(value, Tensor) and (what == "input" or value is not None):
            raise UserError(
                f"{what} of MoELayer",
                got=f"a {type(value).__name__}",
                expected="a tensor",
                do="give a torch.Tensor",
            )
    if x.dim() < 1 or x.shape[-1] != d_model:
        raise UserError(
            "input of MoELayer",
            got=f"shape {list(x.shape)}",
            expected=f"[..., {d_model}]",
            do="make the last dimension d_model",
        )
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise UserError(
            "input of MoELayer",
            got=x.dtype,
            expected=f"{dtype} (the dtype of its parameters)",
            do="convert one of them, or use torch.autocast",
        )
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        raise UserError(
            "mask of MoELayer",
            got=mask.dtype,
            expected="bool, or integers that are 1 for a token and 0 for padding",
            do="give the attention_mask of the tokenizer",
        )
    if token_ids is not None and token_ids.dtype not in (torch.int64, torch.int32):
        raise UserError(
            "token_ids of MoELayer",
            got=token_ids.dtype,
            expected="int64 or int32",
            do="give the ids that the embedding gets",
        )
    shape = x.shape[:-1]
    for what, value, each in (("mask", mask, "flag"), ("token_ids", token_ids, "id")):
        if value is None:
            continue
        fits = value.shape == shape
        if what == "mask" and value.numel() == shape.numel():
            # Flat, or with further dimensions of 1, it lies as the tokens do; transposed it hides others.
            wide, wide_x = ([n for n in s if n != 1] for s in (value.shape, shape))
            fits = wide == wide_x or 1 in (len(wide), len(wide_x))
        if not fits:
            raise UserError(
                f"{what} of MoELayer",
                got=f"shape {list(value.shape)}",
                expected=list(shape),
                do=f"give one {each} per token",
            )


def check_data_parallel(layer: ShardedExperts) -> None:
    """Raise UserError inside a DistributedDataParallel that would average gradients of different experts, or
    without averages over the ranks with the same ones."""
    if torch.compiler.is_compiling() or not layer.expert_group:
        return
    around = DistributedDataParallel._active_ddp_module
    if around is None:
        return
    tensors = layer.expert_tensors()
    trained = {name for name, tensor in tensors.items() if torch.is_grad_enabled() and tensor.requires_grad}
    checked = _CHECKED.setdefault(around, WeakKeyDictionary())
    # Reentrant checkpointing runs a layer without and with gradients in each step.
    if layer in checked and trained <= checked[layer]:
        return
    names = {p: name for name, p in around.module.named_parameters()}
    for own_name, parameter in tensors.items():
        if (name := names.get(parameter)) is None:
            continue
        # PEFT's adapters register a parametrization in each forward; DDP ignores the name without it.
        before = re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name)
        if not {name, before} & around.parameters_to_ignore:
            raise UserError(
                "DistributedDataParallel around an MoELayer",
                got=f"{name} among the parameters that it averages over all ranks",
                expected="only parameters that are the same on all ranks (each rank has its own experts)",
                do="make the model anew (experts were overwritten) and wrap it with lancet_kernels.ddp",
            )
        # The names of what is ignored are copied with a model; what averages a parameter is not.
        if own_name not in trained:
            continue
        if parameter not in AVERAGES:
            raise UserError(
                f"gradient of {name}",
                got="no average over ranks: it was frozen, or this model a copy, when others got theirs",
                expected="one, as ddp and prepare_data_parallel set it",
                do="call either again for this model",
            )
        ranks, data = dist.get_process_group_ranks(around.process_group), group_ranks(AVERAGES[parameter][1])
        if {*ranks} != {*data}:
            raise UserError(
                "process group of DistributedDataParallel",
                got=f"ranks {sorted(ranks)}",
                expected=f"all that have different tokens: {data}",
                do="give it these, or wrap the model with lancet_kernels.ddp",
            )
    checked[layer] = trained | checked.get(layer, set())


BACKENDS = ("torch", "fused")
Weights = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""w1 [L, D, H], b1 [L, H], w2 [L, F, D], b2 [L, D]; H is F, or 2F of a gated activation."""


class ExpertLayer(ShardedExperts):
    """Experts that are divided among the ranks of a group. Subclasses route tokens to them."""

    name = "an MoE layer"
    """For messages; `name_layers` sets the path in the model."""
    takes_weights = True
    """Whether `now.weights` may replace the parameters; see `_present`."""
    equal_on_all_ranks: ClassVar[tuple[str, ...]] = ()
    """Attributes whose parameters are the same on all ranks."""

    def _set_groups(self, groups: AnyGroups | None) -> None:
        groups = without_mesh(groups)
        self.groups = groups if isinstance(groups, Groups) else None
        self.expert_group = expert_group_name(groups)
        self.ranks, self.rank = group_size(self.expert_group), group_rank(self.expert_group)

    def _set_up(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        activation: str,
        backend: str,
        capacity_factor: float | None,
        *,
        timeout: float | None = None,
        max_tokens: int | None = None,
        receive_factor: float | None = None,
    ) -> None:
        """After `_set_groups`. Args: as of `MoELayer`. Raises: UserError."""
        check_experts(num_experts, self.ranks)
        check_factor(capacity_factor)
        fused = backend == "fused"
        what = "activation of a fused layer" if fused else "activation"
        if fused or activation not in EXPRESSIONS:
            check_activation(activation, what, ACTIVATIONS if fused else ALL_ACTIVATIONS)
        self.d_model, self.d_ff, self.num_experts = d_model, d_ff, num_experts
        self.capacity_factor, self.activation = capacity_factor, activation
        self.local_experts = num_experts // self.ranks
        check_name("backend", backend, BACKENDS)
        self.backend = backend
        self.exchange = None
        check_exchange_options(backend, timeout=timeout, max_tokens=max_tokens, receive_factor=receive_factor)
        if fused:
            # Only here: the kernels need Triton, which not every machine has.
            from lancet_kernels.ops.moe.fused_experts import LayerExchange

            self.exchange = LayerExchange(
                self.expert_group, self.local_experts, d_model, d_ff, activation,
                timeout_s=timeout, max_tokens=max_tokens, receive_factor=receive_factor,
            )  # fmt: skip

    def weights(self) -> Weights:
        """The experts of this rank."""
        raise NotImplementedError

    def _present(self, name: str) -> Any:
        """The parameter; in a trace (`graph.capture.trace`) its sum with the adapters' products."""
        return now.weights[name] if name in now.weights else getattr(self, name)

    def memory(self) -> LayerMemory:
        """The memory of fused layers of this size on this rank; receive_factor and max_tokens bound it.

        Raises: UserError before the first pass, and for backend="torch", which holds none between passes.
        """
        if self.exchange is None:
            raise UserError(
                "memory()",
                got="a layer with backend='torch'",
                expected="backend='fused'",
                do="look at what torch allocates",
            )
        return self.exchange.memory()

    def _capacity(self, num_tokens: int, top_k: int) -> int:
        if self.capacity_factor is None:
            return num_tokens
        return max(1, math.ceil(self.capacity_factor * num_tokens * top_k / self.num_experts))

    def _eager_weights(self, x_TD: Tensor) -> tuple[Tensor, Tensor] | None:
        """w1 and w2 if `eager_experts` can run this call: dropless, not traced, not fused; else None."""
        if (
            torch.compiler.is_compiling()
            or self.capacity_factor is not None
            or self.exchange is not None
            or torch.is_autocast_enabled(x_TD.device.type)
        ):
            return None
        w1, b1, w2, _ = self.weights()
        return (w1, w2) if b1 is None and runs_eagerly(x_TD, w1, w2) else None

    def _experts(self, x_TD, expert_TK, slot_TK, weight_TK, used_E, capacity: int, real_T1) -> Tensor:
        """dispatch -> all-to-all -> experts -> all-to-all -> combine. -> [T, D].

        Args: used_E: choices of each expert, dropped ones included. real_T1: false for padding; None: no
            padding.
        """
        count_WL = ops.kept_counts(used_E, capacity, self.ranks)
        # A plan captures single ops, and chooses itself which of them to fuse.
        if self.exchange is not None and not torch.compiler.is_compiling():
            from lancet_kernels.ops.moe.fused_experts import check_fused, fused_experts

            check_fused(x_TD)
            # One rank has nothing to overlap: the ops below run the same grouped GEMMs, without regions.
            if self.ranks > 1:
                w1, b1, w2, b2 = map(cast, self.weights())
                return fused_experts(
                    x_TD, expert_TK, slot_TK, weight_TK, count_WL, capacity, w1, b1, w2, b2, self.exchange
                )
        row_TK = ops.send_rows(expert_TK, slot_TK, count_WL)
        received_WL = ops.exchange_counts(count_WL, x_TD.shape[1], x_TD.dtype, self.expert_group)
        num_choices = row_TK.numel()
        most_rows = self._most_rows(num_choices, capacity)
        is_dropless = self.capacity_factor is None and real_T1 is None
        num_rows = num_choices if is_dropless else None
        sent_SD = ops.dispatch(x_TD, row_TK, None, most_rows, num_rows)
        rows_RD = self._all_to_all(sent_SD, count_WL, received_WL, True)
        rows_RD = self._run(rows_RD, received_WL)
        back_SD = self._all_to_all(rows_RD, received_WL, count_WL, False, sent_SD.shape[0])
        return ops.combine(back_SD, row_TK, weight_TK)

    def _run(self, rows_RD: Tensor, count_WL: Tensor) -> Tensor:
        """This rank's experts, [R, D] -> [R, D]."""
        w1, b1, w2, b2 = self.weights()
        hidden_RH = ops.grouped_gemm(rows_RD, count_WL, cast(w1), cast(b1))
        hidden_RF = ops.expert_activation(hidden_RH, count_WL, self.activation)
        return ops.grouped_gemm(hidden_RF, count_WL, cast(w2), cast(b2))

    def _most_rows(self, num_choices: int, capacity: int) -> int:
        """The most choices that can get a slot; `predict.simulate` overrides it."""
        return min(num_choices, self.num_experts * capacity)

    def _all_to_all(self, rows, send_count_WL, receive_count_WL, to_experts, num_rows=None) -> Tensor:
        """Rows to the experts, or back. One rank's rows need no copy; a traced graph has the op anyway."""
        if not self.expert_group and not torch.compiler.is_compiling():
            return rows
        return ops.all_to_all(rows, send_count_WL, receive_count_WL, self.expert_group, to_experts, num_rows)
