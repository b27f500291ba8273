"""Assigns a slot to each choice.

    T  tokens      K  choices per token, N = T * K choices      B  blocks of choices
    E  experts     C  capacity: slots per expert

    1. histogram   choices of each expert in each block of tokens            count [B, E]
                   (`topk` counts while it chooses; `count_choices` counts existing choices)
    2. prefix      the counts of earlier blocks; used'; the number of rows   before [B, E], in place
    3. slots       used + before + rank inside the block

No atomics: a slot depends only on the order of the tokens, not on the order of the programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.kernels.checks import check_number, check_tensor
from lancet_kernels.kernels.kernel_launch import launch
from lancet_kernels.kernels.moe.rounding import UNFUSED
from lancet_kernels.kernels.moe.topk import RoutingConfig

# The prefix walks this many blocks at a time, for this many experts in a program: 32 bytes of a row each.
PREFIX_BLOCKS, PREFIX_EXPERTS = 256, 8
# Comparisons in one tile: 32 per thread of 4 warps, about 115 registers in `slots_kernel`.
PAIRS = 4096


@triton.jit
def count_choices_kernel(
    expert_ptr, count_ptr, N,
    E: tl.constexpr, CHOICES: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """How many choices of each block go to each expert.

    Grid: (B,). Each program owns CHOICES = block tokens * K choices.
    Shapes: expert [N] int64; count [B, E] int32.
    Floor: reads 8 N bytes, writes 4 B E; N * E comparisons.

    Example: E = 3, expert = [2, 0, 2, 2] in one block -> count = [[1, 0, 3]].
    """
    i_block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BN)
    n = i_block * CHOICES + i
    m = (i < CHOICES) & (n < N)
    b_expert = tl.load(expert_ptr + n, mask=m, other=-1).to(tl.int32)
    for first in range(0, E, BE):
        i_e = first + tl.arange(0, BE)
        # [BN, BE]
        here = (b_expert[:, None] == i_e[None, :]).to(tl.int32)
        tl.store(count_ptr + i_block * E + i_e, tl.sum(here, 0), mask=i_e < E)


@triton.jit
def prefix_kernel(
    count_ptr, used_ptr, used_out_ptr, kept_ptr, B, C, E,
    BB: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """From the counts of each block to those of the blocks before it, `used'`, and how many are kept.

    Grid: (ceil(E / BE),). Each program owns BE experts and walks all blocks, BB at a time.
    Shapes: count [B, E] int32, in place; used, used_out, kept [E] int64.
    Floor: reads and writes 4 B E bytes each.

    Example: C = 6, count = [[1, 2], [3, 0], [1, 1]], used = [5, 0]
    -> count = [[0, 0], [1, 2], [4, 2]], used_out = [10, 3], kept = [1, 3].
    """
    i_e = tl.program_id(0) * BE + tl.arange(0, BE)
    m_e = i_e < E
    total = tl.zeros([BE], tl.int32)
    for first in range(0, B, BB):
        i_b = first + tl.arange(0, BB)
        m = (i_b < B)[:, None] & m_e[None, :]
        p_count = count_ptr + i_b[:, None].to(tl.int64) * E + i_e[None, :]
        # [BB, BE]
        b_count = tl.load(p_count, mask=m, other=0)
        before = tl.cumsum(b_count, 0) - b_count
        tl.store(p_count, total[None, :] + before, mask=m)
        total += tl.sum(b_count, 0)
    used = tl.load(used_ptr + i_e, mask=m_e, other=0)
    used_out = used + total
    tl.store(used_out_ptr + i_e, used_out, mask=m_e)
    tl.store(kept_ptr + i_e, tl.minimum(used_out, C) - tl.minimum(used, C), mask=m_e)


@triton.jit
def slots_kernel(
    expert_ptr, before_ptr, used_ptr, slot_ptr, N,
    E: tl.constexpr, CHOICES: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """The slot of each choice.

    Grid: (B,). Each program owns CHOICES = block tokens * K choices in token order: (t, 0), (t, 1), ...
    Shapes: expert, slot [T, K] int64 (N = T * K); before [B, E] int32, from `prefix_kernel`; used [E] int64.
    Floor: reads and writes 8 N bytes; BN comparisons per choice.

    Example: expert = [[2, 0], [2, 1]], used = [5, 0, 1], before = 0 -> slot = [[1, 5], [2, 0]].
    """
    i_block = tl.program_id(0).to(tl.int64)
    first = i_block * CHOICES
    i = tl.arange(0, BN)
    m = (i < CHOICES) & (first + i < N)
    b_expert = tl.load(expert_ptr + first + i, mask=m, other=-1).to(tl.int32)
    rank = tl.zeros([BN], tl.int32)
    for j in range(0, BN, BJ):
        i_j = j + tl.arange(0, BJ)
        m_j = (i_j < CHOICES) & (first + i_j < N)
        b_other = tl.load(expert_ptr + first + i_j, mask=m_j, other=-1).to(tl.int32)
        earlier = (b_expert[:, None] == b_other[None, :]) & (i_j[None, :] < i[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    b_used = tl.load(used_ptr + b_expert, mask=m, other=0)
    b_slot = b_used + tl.load(before_ptr + i_block * E + b_expert, mask=m, other=0) + rank
    tl.store(slot_ptr + first + i, b_slot, mask=m)


def block_of_choices(config: RoutingConfig, top_k: int) -> tuple[int, int, int]:
    """-> choices per block, their tile (a power of two), and the step in which pairs are compared."""
    choices = config.block_tokens * top_k
    tile = triton.next_power_of_2(choices)
    return choices, tile, min(tile, max(16, PAIRS // tile))


def count_choices(expert_TK: Tensor, num_experts: int, config: RoutingConfig) -> Tensor:
    """-> count_BE int32: how many choices of each block of `config` go to each expert.

    Args: expert_TK: int64, 0 to E - 1 (not checked on the device).
    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    check_tensor("expert_TK", expert_TK, shape=(None, None), dtype=torch.int64)
    check_number("tokens times top_k", expert_TK.numel(), 0, 2**31 - 1)
    num_tokens, top_k = expert_TK.shape
    choices, tile, _ = block_of_choices(config, top_k)
    blocks = triton.cdiv(num_tokens, config.block_tokens)
    count_BE = torch.empty(blocks, num_experts, dtype=torch.int32, device=expert_TK.device)
    if blocks:
        launch(
            count_choices_kernel, (blocks,), expert_ptr=expert_TK, count_ptr=count_BE, N=expert_TK.numel(),
            E=num_experts, CHOICES=choices, BN=tile,
            BE=min(triton.next_power_of_2(num_experts), max(16, PAIRS // tile)), num_warps=config.num_warps,
            **UNFUSED,
        )  # fmt: skip
    return count_BE


def prefix(count_BE: Tensor, used_E: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Overwrite the counts with those of the blocks before. -> used'_E, kept_E (int64).

    Args: count_BE int32; used_E int64, assignments of earlier parts of the batch.
    Returns: used' counts dropped choices too; kept is how many of these choices have a slot below `capacity`.
    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    check_tensor("count_BE", count_BE, shape=(None, None), dtype=torch.int32)
    blocks, num_experts = count_BE.shape
    check_tensor("used_E", used_E, shape=(num_experts,), dtype=torch.int64, device=count_BE.device)
    check_number("capacity", capacity, 0, 2**31 - 1)
    used_out_E, kept_E = torch.empty_like(used_E), torch.empty_like(used_E)
    launch(
        prefix_kernel, (triton.cdiv(num_experts, PREFIX_EXPERTS),), count_ptr=count_BE, used_ptr=used_E,
        used_out_ptr=used_out_E, kept_ptr=kept_E, B=blocks, C=capacity, E=num_experts, BB=PREFIX_BLOCKS,
        BE=PREFIX_EXPERTS, num_warps=4, **UNFUSED,
    )  # fmt: skip
    return used_out_E, kept_E


def slots(expert_TK: Tensor, before_BE: Tensor, used_E: Tensor, config: RoutingConfig) -> Tensor:
    """-> slot_TK int64.

    Args: before_BE: from `prefix`, counted with the same `config`.
    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    num_tokens, top_k = expert_TK.shape
    num_experts = used_E.shape[0]
    slot_TK = torch.empty_like(expert_TK)
    choices, tile, step = block_of_choices(config, top_k)
    blocks = triton.cdiv(num_tokens, config.block_tokens)
    check_tensor(
        "before_BE", before_BE, shape=(blocks, num_experts), dtype=torch.int32, device=expert_TK.device
    )
    if blocks:
        launch(
            slots_kernel, (blocks,), expert_ptr=expert_TK, before_ptr=before_BE, used_ptr=used_E,
            slot_ptr=slot_TK, N=expert_TK.numel(), E=num_experts, CHOICES=choices, BN=tile, BJ=step,
            num_warps=config.num_warps, **UNFUSED,
        )  # fmt: skip
    return slot_TK
