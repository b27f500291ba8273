"""Hash and random gates: routing that is computed from a key instead of learned.

Each (key, expert) pair gets a 64-bit number from a counter (`ops.random`), and a token goes to the k
experts with the largest numbers, however the batch was cut. Hash (Roller et al. 2021) keys by token id: a
token of the vocabulary always meets the same experts. Random (Zuo et al. 2022, Chen et al. 2023) keys by the
global index of the token in the step's batch, mixed with the step.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.ops.moe.gates.base import Gate
from lancet_kernels.ops.moe.gates.slots import top_k_stable
from lancet_kernels.ops.random import GOLDEN, signed, splitmix64


@dataclass(frozen=True)
class _Counter(Gate):
    uses_logits: ClassVar[bool] = False
    seed: int = 0

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        token_T1 = splitmix64(key_T + signed(self.seed * GOLDEN))[:, None]
        number_TE = splitmix64(token_T1 + torch.arange(num_experts, device=key_T.device))
        return top_k_stable(number_TE, top_k)


@dataclass(frozen=True)
class Hash(_Counter):
    """Fixed experts for every token id. seed: which fixed assignment."""

    name: ClassVar[str] = "hash"
    key: ClassVar[str] = "token"


@dataclass(frozen=True)
class Random(_Counter):
    """Random experts for every token of every step. seed: which random assignment."""

    name: ClassVar[str] = "random"
    key: ClassVar[str] = "index"
