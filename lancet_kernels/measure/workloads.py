"""MoE layers to tune and to measure: those that other libraries report, and the Lancet paper's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lancet_kernels.errors import UserError


@dataclass(frozen=True)
class Workload:
    """An MoE layer on one rank.

    Attributes: tokens T here, width D, hidden F, experts E in all, choices K, activation of the experts.
    """

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    activation: str = "gelu"

    @property
    def wide(self) -> int:
        """Columns of the first weight: F, for swiglu 2F."""
        return 2 * self.hidden if self.activation == "swiglu" else self.hidden

    @property
    def capacity(self) -> int:
        """C of a perfect balance: T * K / E, rounded up. Comparing libraries takes C as given."""
        return -(-self.tokens * self.choices // self.experts)

    def small(self) -> Workload:
        """A workload of the same kind for the interpreter: a pass takes a second instead of an hour."""
        experts, choices = min(self.experts, 4), min(self.choices, 2)
        return replace(self, tokens=32, width=32, hidden=32, experts=experts, choices=choices)

    def __str__(self) -> str:
        sizes = f"T{self.tokens} D{self.width} F{self.hidden} E{self.experts} K{self.choices}"
        return f"{self.name} ({sizes} {self.activation})"


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("wide", 32768, 4096, 1024, 64, 4, "swiglu"),
        Workload("fine-grained", 40960, 768, 256, 128, 8, "swiglu"),
        Workload("middle", 24576, 1536, 512, 64, 4, "swiglu"),
        # 24 and 8 sequences of 512 tokens: the paper's batch on A100 (small), on V100 (large).
        Workload("gpt2-s-moe", 12288, 768, 3072, 16, 1),
        Workload("gpt2-l-moe", 4096, 1024, 4096, 16, 1),
    )
}


def parse_workload(text: str) -> Workload:
    """A name of WORKLOADS, or `T,D,F,E,K` with an activation after it if it is not gelu.

    Example: `8192,1024,4096,16,2,swiglu`. Raises UserError for anything else.
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    *sizes, last = text.split(",")
    activation = last if last in ("none", "gelu", "silu", "swiglu") else "gelu"
    numbers = sizes if activation == last else [*sizes, last]
    if len(numbers) != 5 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise UserError(
            "workload",
            got=repr(text),
            expected=f"one of {', '.join(WORKLOADS)}, or T,D,F,E,K[,activation]",
            do="give five numbers, for example 8192,1024,4096,16,2",
        )
    tokens, width, hidden, experts, choices = map(int, numbers)
    if choices > experts:
        raise UserError("workload", got=repr(text), expected="K at most E", do="lower the number of choices")
    return Workload("given", tokens, width, hidden, experts, choices, activation)
