"""Routing: from scores to experts, and to slots within the capacity.

    T  tokens on this rank      E  experts in all      B  blocks of tokens
    K  choices per token        C  capacity

Three launches for every gate:

    1. choose    the K best experts of each token, counted per block  topk.py
    2. prefix    counts of earlier blocks, used', number of rows      slots.py
    3. slots     the slot of each choice                              slots.py

All results are integers, and bitwise equal to those of `lancet_kernels.ops.moe.gates`. Weights are not
computed here: exp in Triton and in torch may differ in the last bit, and then ranks with and without kernels
would route differently. So softmax and sigmoid stay torch ops, before these kernels (the scores of the
sigmoid gate) and after them (`Gate.weights` of the chosen experts).

`used` is an input and `used'` a result, with dropped choices: a batch that is routed part by part gets the
same slots, and so the same drops, as one that is routed at once (Lancet, section 2.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lancet_kernels.kernels.checks import check_number, check_tensor
from lancet_kernels.kernels.moe import slots as slot_kernels
from lancet_kernels.kernels.moe.topk import MAX_EXPERTS, RoutingConfig, choose_by_key, choose_by_score


class Routed(NamedTuple):
    """Where the choices of T tokens go.

    The rows of this call sit in slots min(used, C) to min(used', C) - 1 of their expert; `kept_E` is how many
    those are.
    """

    expert_TK: Tensor  # int64
    slot_TK: Tensor  # int64; >= C: dropped
    used_E: Tensor  # int64: used'
    kept_E: Tensor  # int64


def route_scores(
    score_TE: Tensor,
    used_E: Tensor,
    top_k: int,
    capacity: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    config: RoutingConfig | None = None,
) -> Routed:
    """Route by the largest scores, in token order: switch and top-k (the logits), sigmoid (biased scores).

    Args: score_TE float32 or float64; groups, top_groups: see `choose_by_score`.
    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    shape = used_E.numel(), top_k, 8 * score_TE.itemsize
    config = config or RoutingConfig.default(*shape)
    check_tensor("used_E", used_E, shape=score_TE.shape[-1:], dtype=torch.int64, device=score_TE.device)
    expert_TK, count_BE = choose_by_score(
        score_TE, top_k, groups=groups, top_groups=top_groups, config=config
    )
    return _in_token_order(expert_TK, count_BE, used_E, capacity, config)


def route_keys(key_T: Tensor, used_E: Tensor, top_k: int, capacity: int, *, seed: int = 0) -> Routed:
    """Route by the hash of a key, in token order: hash (token ids) and random (global token indices).

    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    config = RoutingConfig.default(used_E.numel(), top_k, 64)
    check_tensor("used_E", used_E, shape=(None,), dtype=torch.int64, device=key_T.device)
    expert_TK, count_BE = choose_by_key(key_T, used_E.shape[0], top_k, seed=seed, config=config)
    return _in_token_order(expert_TK, count_BE, used_E, capacity, config)


def route_choices(expert_TK: Tensor, used_E: Tensor, capacity: int) -> Routed:
    """Give given choices their slots in token order, for a gate that selects in torch.

    Args: expert_TK int64, 0 to E - 1 (not checked on the device).
    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    # Of the kernels that work on choices alone none holds a tile of all experts: as if there were few.
    config = RoutingConfig.default(1, max(1, expert_TK.shape[-1] if expert_TK.ndim else 1))
    check_number("number of experts", used_E.numel(), 1, MAX_EXPERTS)
    check_tensor("used_E", used_E, shape=(None,), dtype=torch.int64, device=expert_TK.device)
    count_BE = slot_kernels.count_choices(expert_TK, used_E.shape[0], config)
    return _in_token_order(expert_TK, count_BE, used_E, capacity, config)


def _in_token_order(
    expert_TK: Tensor, count_BE: Tensor, used_E: Tensor, capacity: int, config: RoutingConfig
) -> Routed:
    used_out_E, kept_E = slot_kernels.prefix(count_BE, used_E, capacity)
    slot_TK = slot_kernels.slots(expert_TK, count_BE, used_E, config)
    return Routed(expert_TK, slot_TK, used_out_E, kept_E)
