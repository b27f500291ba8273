"""Argument checks of `MoELayer`: sizes in its constructor; tensors, and wrappers around it, in its calls."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lancet_kernels.errors import UserError
from lancet_kernels.layer.expert_states import ShardedExperts
from lancet_kernels.ops.moe.gates import GATES, Gate

# Layers whose experts a DistributedDataParallel module leaves alone.
_CHECKED: WeakKeyDictionary[DistributedDataParallel, WeakSet[ShardedExperts]] = WeakKeyDictionary()


def is_number(value: object, kind: type = Real) -> bool:
    """Is this a number of the kind? A bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_sizes(
    gate: Gate, d_model: int, d_ff: int, num_experts: int, top_k: int, shared_d_ff: int | None
) -> None:
    """Raise UserError for sizes that no layer can have."""
    if not isinstance(gate, Gate):
        raise UserError(
            "gate", got=repr(gate), expected=f"one of {', '.join(GATES)}, or a Gate", do="name one"
        )
    sizes = {"d_model": d_model, "d_ff": d_ff, "num_experts": num_experts, "top_k": top_k}
    if shared_d_ff is not None:
        sizes["shared_expert_d_ff"] = shared_d_ff
    for what, value in sizes.items():
        if not is_number(value, Integral):
            raise UserError(what, got=repr(value), expected="a whole number", do="give an int")
        if value < 1 and what in ("d_model", "d_ff", "num_experts"):
            raise UserError(what, got=value, expected="at least 1", do="give a positive size")
    if shared_d_ff is not None and shared_d_ff < 1:
        raise UserError(
            "shared_expert_d_ff", got=shared_d_ff, expected="at least 1 or None", do="leave it out"
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
    """Raise UserError for a forward of other tensors than [..., d_model] in `dtype`, and one flag of the mask
    and one id per token."""
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
    if mask is not None and mask.numel() != x.shape[:-1].numel():
        raise UserError(
            "mask of MoELayer",
            got=f"shape {list(mask.shape)}",
            expected=list(x.shape[:-1]),
            do="give one flag per token",
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


def check_data_parallel(layer: ShardedExperts) -> None:
    """Raise UserError inside a DistributedDataParallel that would average different experts."""
    if torch.compiler.is_compiling() or not layer.expert_group:
        return
    around = DistributedDataParallel._active_ddp_module
    if around is None or layer in _CHECKED.setdefault(around, WeakSet()):
        return
    names = {p: name for name, p in around.module.named_parameters()}
    for parameter in layer.expert_tensors().values():
        name = names.get(parameter)
        # An adapter of PEFT registers a parametrization in each forward: it was ignored by its own name.
        before = re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name or "")
        if name is not None and not {name, before} & around.parameters_to_ignore:
            raise UserError(
                "DistributedDataParallel around an MoELayer",
                got=f"{name} among the parameters that it averages over all ranks",
                expected="only parameters that are the same on all ranks (each rank has its own experts)",
                do="make the model anew (experts were overwritten) and wrap it with lancet_kernels.ddp",
            )
    _CHECKED[around].add(layer)
