"""Chooses the K experts of each token: by score (switch, top-k, sigmoid) or by key (hash, random).

    T  tokens      K  choices per token      B  blocks of tokens
    E  experts     G  groups of S = E / G experts

Both kernels also count the choices per block and expert, [B, E]: the first step of assigning slots
(`slots_kernel`), which is nearly free here, because the one-hot of the choices is in registers.

Scores are compared as integers, so that results are bitwise those of `top_k_stable`: NaN is the largest, -0
and 0 are equal, and of equal scores the lower index wins.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.checks import check_number, check_tensor
from lancet_kernels.kernels.kernel_launch import launch
from lancet_kernels.kernels.moe.rounding import UNFUSED

MAX_EXPERTS = 4096
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
# No expert: larger than every expert index.
NO_EXPERT = tl.constexpr(1 << 30)


@dataclass(frozen=True)
class RoutingConfig:
    """The tile of the routing kernels.

    Attributes: block_tokens: tokens per program, a power of two; the kernels that count and the one that
    assigns slots must use the same, because they share the [B, E] table.
    """

    block_tokens: int
    num_warps: int = 4

    def is_valid(self, num_experts: int, top_k: int) -> bool:
        """At most 64 keys per thread, and few enough choices to compare all pairs within a block."""
        block, keys = self.block_tokens, self.block_tokens * lanes(num_experts)
        power_of_two = block > 0 and block & (block - 1) == 0 and self.num_warps in (1, 2, 4, 8)
        # One token is always allowed: there is no smaller block.
        small = keys <= 64 * 32 * self.num_warps and block * triton.next_power_of_2(top_k) <= 1024
        return power_of_two and (small or block == 1)

    @staticmethod
    def default(num_experts: int, top_k: int, key_bits: int = 32) -> "RoutingConfig":
        """About 128 choices, and at most 4096 keys of 32 bits or 2048 of 64 (more take 255 registers)."""
        by_choices = 128 // min(128, triton.next_power_of_2(top_k))
        by_pairs = max(1, 4096 * 32 // key_bits // lanes(num_experts))
        return RoutingConfig(min(by_choices, by_pairs))


def lanes(num_experts: int, groups: int = 1) -> int:
    """Width of a tile that holds all experts: groups and their sizes, each up to a power of two."""
    return triton.next_power_of_2(groups) * triton.next_power_of_2(num_experts // groups)


@triton.jit
def _order_key(b_x):
    """Integer keys with the order that `top_k_stable` has for floats. float32 -> int32, float64 -> int64.

    Sign and magnitude as an integer: -0 becomes 0, -inf the smallest key, NaN the largest.
    """
    if b_x.dtype == tl.float64:
        bits = b_x.to(tl.int64, bitcast=True)
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
        key = tl.where(magnitude > 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF, magnitude)
    else:
        bits = b_x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        key = tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, magnitude)
    return tl.where((bits < 0) & (key == magnitude), -magnitude, key)


@triton.jit
def _key_value(key):
    """The float of a key of `_order_key`."""
    if key.dtype == tl.int64:
        value = tl.where(key < 0, (-key) ^ -0x8000000000000000, key).to(tl.float64, bitcast=True)
    else:
        value = tl.where(key < 0, (-key) ^ -0x80000000, key).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _best(key, i_e, free, AXIS: tl.constexpr):
    """The largest free key along AXIS, and the lowest index that has it (NO_EXPERT if none is free)."""
    smallest: tl.constexpr = -0x8000000000000000 if key.dtype == tl.int64 else -0x80000000
    top = tl.max(tl.where(free, key, smallest), AXIS)
    is_best = free & (key == tl.expand_dims(top, AXIS))
    return top, tl.min(tl.where(is_best, i_e, NO_EXPERT), AXIS)


@triton.jit
def _outside_best_groups(
    key, m_lane, TOP_GROUPS: tl.constexpr, S: tl.constexpr,
    BT: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Which lanes are in none of a token's best groups? key: [BT, BG * BS] -> bool, the same shape.

    A group's score is the sum of its two best scores (of its only one if S = 1).
    """
    key = tl.reshape(key, [BT, BG, BS])
    free = tl.reshape(tl.broadcast_to(m_lane[None, :], [BT, BG * BS]), [BT, BG, BS])
    i_s = tl.arange(0, BS)[None, None, :]
    m_group = tl.max(free.to(tl.int32), 2) > 0
    top, i_top = _best(key, i_s, free, 2)
    score = _key_value(top)
    if S > 1:
        second, _ = _best(key, i_s, free & (i_s != i_top[:, :, None]), 2)
        score += _key_value(second)
    group_key = _order_key(score)
    i_g = tl.arange(0, BG)[None, :]
    for _ in range(TOP_GROUPS):
        _, i_best = _best(group_key, i_g, m_group, 1)
        m_group = m_group & (i_g != i_best[:, None])
    return tl.reshape(tl.broadcast_to(m_group[:, :, None], [BT, BG, BS]), [BT, BG * BS])


@triton.jit
def _choose(
    key, free, i_e, m_e, i_block, t, m_t, expert_ptr, count_ptr,
    E: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Store the K best experts of each token, best first, and how many tokens of the block chose each."""
    m_token = free
    for k in range(K):
        _, best = _best(key, i_e[None, :], free, 1)
        tl.store(expert_ptr + t * K + k, best.to(tl.int64), mask=m_t)
        free = free & (i_e[None, :] != best[:, None])
    chosen = (m_token & (free == 0)).to(tl.int32)
    tl.store(count_ptr + i_block * E + i_e, tl.sum(chosen, 0), mask=m_e)


@triton.jit
def choose_by_score_kernel(
    score_ptr, expert_ptr, count_ptr, T,
    E: tl.constexpr, K: tl.constexpr, S: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BT: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The K best-scored experts of each token, best first, and their counts per block.

    Grid: (B,). Each program owns BT tokens and all their scores.
    Shapes: score [T, E] float32 or float64; expert [T, K] int64; count [B, E] int32.
    Floor: reads 4 T E bytes, writes 8 T K; about 4 K T E integer operations.
    Groups: of G = E / S groups of S experts, only the TOP_GROUPS best of a token are open (0: all are); the
    scores of the others count as -inf.

    Example: score = [[1, 5, 5, NaN]], K = 3 -> expert = [[3, 1, 2]], count = [[0, 1, 1, 1]].
    """
    i_block = tl.program_id(0).to(tl.int64)
    t = i_block * BT + tl.arange(0, BT)
    m_t = t < T
    # Each group begins at a multiple of BS lanes, so that a reshape makes groups of lanes.
    lane = tl.arange(0, BG * BS)
    i_e = (lane // BS) * S + lane % BS
    m_e = (lane % BS < S) & (i_e < E)
    free = m_t[:, None] & m_e[None, :]
    # [BT, BG * BS]
    b_score = tl.load(score_ptr + t[:, None] * E + i_e[None, :], mask=free, other=0.0)
    key = _order_key(b_score)
    if TOP_GROUPS > 0:
        closed = _outside_best_groups(key, m_e, TOP_GROUPS, S, BT, BG, BS)
        infinity: tl.constexpr = 0x7FF0000000000000 if key.dtype == tl.int64 else 0x7F800000
        key = tl.where(closed, -infinity, key)
    _choose(key, free, i_e, m_e, i_block, t, m_t, expert_ptr, count_ptr, E, K)


@triton.jit
def _splitmix64(x):
    """The splitmix64 finalizer on uint64; addition and multiplication wrap."""
    x = x + GOLDEN
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["salt"])
def choose_by_key_kernel(
    key_ptr, expert_ptr, count_ptr, T, salt,
    E: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The K experts with the largest hash of (key, expert), largest first, and their counts per block.

    Grid: (B,). Each program owns BT tokens.
    Shapes: key [T] int64; salt int64; expert [T, K] int64; count [B, E] int32.
    Floor: 12 T E 64-bit integer operations for the hashes, 4 K T E for the choices; writes 8 T K bytes.

    Example: E = 4, K = 2, key = [7], salt = 0 -> expert = [[1, 3]], count = [[0, 1, 0, 1]].
    """
    i_block = tl.program_id(0).to(tl.int64)
    t = i_block * BT + tl.arange(0, BT)
    m_t = t < T
    i_e = tl.arange(0, BE)
    m_e = i_e < E
    b_key = tl.load(key_ptr + t, mask=m_t, other=0) + salt
    token = _splitmix64(b_key.to(tl.uint64, bitcast=True))
    number = _splitmix64(token[:, None] + i_e[None, :].to(tl.uint64)).to(tl.int64, bitcast=True)
    free = m_t[:, None] & m_e[None, :]
    _choose(number, free, i_e, m_e, i_block, t, m_t, expert_ptr, count_ptr, E, K)


def _outputs(num_tokens: int, num_experts: int, top_k: int, config: RoutingConfig, device: torch.device):
    check_number("number of experts", num_experts, 1, MAX_EXPERTS)
    check_number("top_k", top_k, 1, num_experts)
    check_number("tokens times top_k", num_tokens * top_k, 0, 2**31 - 1)
    if not config.is_valid(num_experts, top_k):
        raise UserError(
            "routing configuration",
            got=config,
            expected="a power of two, at most 64 keys a thread",
            do="leave it out for the default",
        )
    blocks = triton.cdiv(num_tokens, config.block_tokens)
    expert_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    return expert_TK, torch.empty(blocks, num_experts, dtype=torch.int32, device=device)


def choose_by_score(
    score_TE: Tensor, top_k: int, *, groups: int = 1, top_groups: int = 1, config: RoutingConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The K largest scores of each token, as `top_k_stable`; ties go to the lower index, NaN is largest.

    Args:
        score_TE: float32 or float64: the logits, or for the sigmoid gate the biased scores.
        groups, top_groups: choose only from the best groups of each token (DeepSeek-V3); scores are then
            compared group by group by the sum of their two best.
    Returns: expert_TK int64; count_BE int32, how many tokens of each block of `config` chose each expert.
    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    check_tensor("score_TE", score_TE, shape=(None, None), dtype=(torch.float32, torch.float64))
    num_tokens, num_experts = score_TE.shape
    config = config or RoutingConfig.default(num_experts, top_k, 8 * score_TE.itemsize)
    expert_TK, count_BE = _outputs(num_tokens, num_experts, top_k, config, score_TE.device)
    if groups < 1 or num_experts % groups:
        raise UserError(
            "groups", got=groups, expected=f"a divisor of {num_experts}", do="check the gate's options"
        )
    size = num_experts // groups
    check_number("top_groups", top_groups, triton.cdiv(top_k, size), groups)
    limited = top_groups < groups
    if num_tokens:
        launch(
            choose_by_score_kernel, (count_BE.shape[0],), score_ptr=score_TE, expert_ptr=expert_TK,
            count_ptr=count_BE, T=num_tokens, E=num_experts, K=top_k, S=size if limited else num_experts,
            TOP_GROUPS=top_groups if limited else 0, BT=config.block_tokens,
            BG=triton.next_power_of_2(groups) if limited else 1,
            BS=triton.next_power_of_2(size if limited else num_experts), num_warps=config.num_warps,
            **UNFUSED,
        )  # fmt: skip
    return expert_TK, count_BE


def choose_by_key(
    key_T: Tensor, num_experts: int, top_k: int, *, seed: int = 0, config: RoutingConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The K experts with the largest splitmix64 numbers, as the hash and random gates choose.

    Args: key_T: int64, token ids (hash) or global token indices (random). seed: the gate's.
    Returns: expert_TK int64; count_BE int32, how many tokens of each block of `config` chose each expert.
    Raises: UserError for wrong dtypes, shapes, layouts or sizes.
    """
    check_tensor("key_T", key_T, shape=(None,), dtype=torch.int64)
    num_tokens = key_T.shape[0]
    config = config or RoutingConfig.default(num_experts, top_k, 64)
    expert_TK, count_BE = _outputs(num_tokens, num_experts, top_k, config, key_T.device)
    salt = (seed * GOLDEN.value) % (1 << 64)
    if num_tokens:
        launch(
            choose_by_key_kernel, (count_BE.shape[0],), key_ptr=key_T, expert_ptr=expert_TK,
            count_ptr=count_BE, T=num_tokens, salt=salt - (1 << 64) if salt >> 63 else salt, E=num_experts,
            K=top_k, BT=config.block_tokens, BE=lanes(num_experts), num_warps=config.num_warps, **UNFUSED,
        )  # fmt: skip
    return expert_TK, count_BE
