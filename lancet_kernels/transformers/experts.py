"""The experts module of a transformers model, with the experts of this rank.

Since version 5, the MoE blocks of transformers call `experts(hidden_states, top_k_index, top_k_weights)`, and
the classes of their experts have flags for the layout of weights (`use_experts_implementation`):

    has_gate       gate_up_proj; else up_proj      is_transposed    [E, in, out]; else as of nn.Linear
    has_bias       ..._bias [E, out]               _apply_gate      [R, 2F] -> [R, F]
    has_post_expert_norm    post_expert_norm, of the output of each expert, before it is weighted

The module stays, with its names, hooks and the layout of its parameters, of which it keeps the rows of this
rank's experts. Its class becomes a subclass of its own, in which only the computation differs: rows, slots,
counts, capacity and kernels are those of `MoELayer`. Router and block stay the model's own code.

    T  tokens on this rank      E  experts in all       K  choices per token
    R  rows received            D  model width          F, H  hidden width, width of the activation's input

Some families have one experts module without that interface; `ADAPTERS` has classes for it and for the block
around it, which calls it with `(hidden_states, top_k_index, top_k_weights)`.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lancet_kernels import ops
from lancet_kernels.kernels.config import ALL_ACTIVATIONS, GATED
from lancet_kernels.layer.expert_layer import ExpertLayer, Weights, check_data_parallel
from lancet_kernels.layer.moe_layer import checkpointed_run
from lancet_kernels.ops.base import cast, now
from lancet_kernels.ops.comm.groups import AnyGroups
from lancet_kernels.ops.comm.waiting import enter_layer
from lancet_kernels.ops.moe.eager_experts import eager_experts
from lancet_kernels.ops.moe.expert_ops import EXPRESSIONS, Expression, activate

_CLASSES: dict[tuple[type, type], type] = {}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Derived(nn.Module):
    """Base of the classes of `derived`."""

    lancet_bases: tuple[type, type]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Copies and pickles create the class again, because it cannot be imported."""
        return _new, self.lancet_bases, self.__dict__


def derived(base: type, own: type) -> Any:
    """A subclass of `base` and the model's class, in this order."""
    if (base, own) not in _CLASSES:
        attributes = {"__module__": own.__module__, "lancet_bases": (base, own)}
        _CLASSES[base, own] = type(f"Lancet{own.__name__}", (base, own), attributes)
    return _CLASSES[base, own]


def _new(base: type, own: type) -> nn.Module:
    module = object.__new__(derived(base, own))
    nn.Module.__init__(module)
    return module


class ConvertedExperts(ExpertLayer, Derived):
    """Base of the classes of `expert_parallel`."""

    down_proj: Tensor
    equal_on_all_ranks: ClassVar[tuple[str, ...]] = ("post_expert_norm",)

    def expert_names(self) -> list[str]:
        return [*_weights(self), *_biases(self)]

    def weights(self) -> Weights:
        (w1, w2), biases = (self._present(name) for name in _weights(self)), _biases(self)
        b1, b2 = (self._present(name) for name in biases) if biases else (None, None)
        if not _flag(self, "is_transposed"):
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        return w1, b1, w2, b2

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, D], top_k_index [T, K] (of E), top_k_weights [T, K] -> [T, D].

        Raises: UserError (ranks that disagree), CommunicationError.
        """
        check_data_parallel(self)
        if not torch.compiler.is_compiling():
            enter_layer(self.name)
        if _flag(self, "has_post_expert_norm"):
            return self._normed(hidden_states, top_k_index, top_k_weights)
        return self._weighted(hidden_states, top_k_index, top_k_weights)

    def _normed(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """With the norm of each choice: choices are tokens with one expert each, as many rows as otherwise,
        with the same capacity. The norm, the same for all experts, follows the return."""
        choices = top_k_index.shape[1]
        rows = hidden_states.unsqueeze(1).expand(-1, choices, -1).flatten(0, 1)
        ones = torch.ones_like(top_k_weights)
        y = self._weighted(rows, top_k_index.view(-1, 1), ones.view(-1, 1), choices)
        y_TKD = self.post_expert_norm(y).view(*top_k_index.shape, -1)
        return (y_TKD * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _weighted(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, rows_of_token: int = 1
    ) -> Tensor:
        """The weighted sum of the experts' outputs for each row."""
        expert_TK, dtype = top_k_index.to(torch.int64), self._present("down_proj").dtype
        mask, run = now.padding_mask, checkpointed_run(hidden_states)
        # A mask of another length is not of these tokens; then all count, as in transformers.
        real_T1 = None
        if mask is not None and mask.numel() * rows_of_token == len(expert_TK):
            real_T1 = mask.reshape(-1, 1).to(torch.bool).repeat_interleave(rows_of_token, 0)
        if run is not None:
            first_TK, real_T1 = run.as_at_first(self, (expert_TK.int(), real_T1))
            expert_TK = first_TK.long()
        x_TD = cast(hidden_states.reshape(-1, hidden_states.shape[-1]).to(dtype))
        weights = self._eager_weights(x_TD)
        if weights is not None:
            y_TD, _ = eager_experts(
                x_TD, expert_TK, top_k_weights, *weights,
                self.num_experts, self.activation, self.expert_group, real_T1,
            )  # fmt: skip
        else:
            capacity = self._capacity(*expert_TK.shape)
            used_E = torch.zeros(self.num_experts, dtype=torch.int64, device=x_TD.device)
            slot_TK, used_E = ops.assign_slots(expert_TK, used_E, real_T1)
            y_TD = self._experts(x_TD, expert_TK, slot_TK, top_k_weights, used_E, capacity, real_T1)
        # No view where it can be avoided: one that is changed in place loses the hook of FSDP.
        y = y_TD if y_TD.shape == hidden_states.shape else y_TD.view(hidden_states.shape)
        return y.to(hidden_states.dtype)


def _flag(experts: nn.Module, name: str) -> bool:
    """A flag of the class, ours before the model's; else transformers' default."""
    return getattr(experts, f"_{name}", getattr(experts, name, name == "has_gate"))


def _weights(experts: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if _flag(experts, "has_gate") else "up_proj"), "down_proj"


def _biases(experts: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}_bias" for name in _weights(experts)) if _flag(experts, "has_bias") else ()


def has_interface(module: nn.Module) -> bool:
    """Whether it has the experts interface of transformers 5."""
    return hasattr(module, "_apply_gate") and hasattr(module, "down_proj")


def reason_against(experts: Any, kind: type[ConvertedExperts] = ConvertedExperts) -> str:
    """The reason why such experts cannot be converted; "" if they can."""
    norm = "post_expert_norm." if _flag(experts, "has_post_expert_norm") else "-"
    parameters = {name: p for name, p in experts.named_parameters() if not name.startswith(norm)}
    if parameters.keys() != {*kind.expert_names(experts)}:
        return f"its parameters are {', '.join(sorted(parameters)) or 'none'}"
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters.values() if p.dtype not in DTYPES}
    return f"its weights are quantized ({', '.join(dtypes)}): dequantize them first" if dtypes else ""


def expert_parallel(
    experts: Any,
    groups: AnyGroups | None,
    backend: str = "torch",
    capacity_factor: float | None = None,
    kind: type[ConvertedExperts] = ConvertedExperts,
) -> ConvertedExperts:
    """Make experts a layer of this library, in place; their parameters stay as they are.

    Args: groups, backend, capacity_factor: as of `MoELayer`. kind: the class for the layout of their weights.
    Raises: UserError.
    """
    own = type(experts)
    experts.__class__ = derived(kind, own)
    num_experts, *widths = experts.down_proj.shape
    d_ff, d_model = widths if _flag(experts, "is_transposed") else reversed(widths)
    activation = _activation_of(experts, own.__name__)
    experts._set_groups(groups)
    experts._set_up(d_model, d_ff, num_experts, activation, backend, capacity_factor)
    return experts


def _activation_of(experts: Any, own_name: str) -> str:
    """A name for `ops.expert_activation`: the activation with the same values, whatever the model calls it;
    else an expression."""
    own = object.__new__(type(experts))
    own.__dict__ = {**experts.__dict__, "_parameters": {}}  # an expression must not keep the weights alive
    gated = _flag(experts, "has_gate")
    expression = own._apply_gate if gated else own.act_fn
    for kind in ALL_ACTIVATIONS:
        if (kind in GATED) == gated and _agree(expression, partial(activate, kind=kind)):
            return kind
    # The expression is named after the class and its numeric attributes.
    numbers = {**getattr(getattr(experts, "act_fn", None), "__dict__", {}), **experts.__dict__}
    settings = ", ".join(f"{name}={n}" for name, n in numbers.items() if type(n) in (int, float))
    for number in count(1):
        name = f"{own_name}({settings}){f'#{number}' if number > 1 else ''}"
        if _agree(EXPRESSIONS.setdefault(name, expression), expression):
            return name
    raise AssertionError


def _agree(one: Expression, other: Expression) -> bool:
    """Whether they agree on values of magnitudes 0.1 to 1000, beyond common clamps."""
    index = torch.arange(1024, dtype=torch.float64, device="cpu")  # also within torch.device("meta")
    sample = (index.sin() * 10 ** (index % 5 - 1)).view(16, 64)
    with torch.no_grad():
        a, b = one(sample), other(sample)
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


class Llama4Experts(ConvertedExperts):
    """For `Llama4TextExperts`, which has no flags. PEFT reads a public `is_transposed`, and its adapters must
    fit the original, so the flag is private."""

    _is_transposed = True

    def _apply_gate(self: Any, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Llama4Block(Derived):
    """For `Llama4TextMoe`.

    There every expert gets every token times its score [T, E], which is 0 where the expert is not chosen: E
    rows a token, all but K of them zeros. Here only the K choices are rows, scaled before the experts, too.
    """

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [B, S, D] -> [B * S, D] and the router's logits [B * S, E], as of the original."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        score_TE, logits_TE = self.router(x_TD)
        expert_TK = logits_TE.topk(self.top_k, dim=1).indices
        score_TK = score_TE.gather(1, expert_TK)
        # Each choice is a token with one expert and weight 1.
        rows = (x_TD.unsqueeze(1) * score_TK.unsqueeze(2)).flatten(0, 1)
        y = self.experts(rows, expert_TK.view(-1, 1), torch.ones_like(score_TK).view(-1, 1))
        return self.shared_expert(x_TD) + y.view(*expert_TK.shape, -1).sum(1), logits_TE


class DbrxExperts(ConvertedExperts):
    """For `DbrxExpertGLU`: w1 (gates), v1 and w2 are [E * F, D], expert after expert."""

    _is_transposed = True

    def expert_names(self) -> list[str]:
        return ["w1", "v1", "w2"]

    def rows_per_expert(self: Any) -> int:
        return self.ffn_hidden_size

    def _by_expert(self: Any, name: str) -> Tensor:
        """[L * F, D] -> [L, F, D]"""
        return self._present(name).view(-1, self.ffn_hidden_size, self.hidden_size)

    @property
    def gate_up_proj(self) -> Tensor:
        return torch.cat((self._by_expert("w1"), self._by_expert("v1")), 1).transpose(1, 2)

    @property
    def down_proj(self) -> Tensor:  # type: ignore[override]
        return self._by_expert("w2")

    def _apply_gate(self: Any, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.activation_fn(gate) * up


class DbrxBlock(Derived):
    """For transformers' `DbrxExperts`, which would run expert by expert."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.mlp(hidden_states, top_k_index, top_k_weights)


class Adapter(NamedTuple):
    experts: type[ConvertedExperts]
    block: type[Derived]


ADAPTERS = {
    "Llama4TextExperts": Adapter(Llama4Experts, Llama4Block),
    "DbrxExpertGLU": Adapter(DbrxExperts, DbrxBlock),
}
