"""What a step recomputes (activation checkpointing), what that costs, and the memory that it saves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.program import Kind, Program, original_name
from lancet_kernels.schedules.time.peak_memory import peak_memory


@dataclass(frozen=True)
class Recomputation:
    """The recomputed instructions of a Program.

    Attributes:
        instructions: their number; all_to_alls: how many of them are all-to-alls.
        compute_ms, link_ms: their time on the device and on the link.
        peak_memory_gb: of the Program in its own order. saved_gb: how much higher that would be if the
            backward read the results of the forward.
    """

    instructions: int
    all_to_alls: int
    compute_ms: float
    link_ms: float
    peak_memory_gb: float
    saved_gb: float

    @classmethod
    def of(cls, program: Program, cost: Cost) -> Recomputation | None:
        """None: nothing is recomputed."""
        recomputed = [i for i in program.instructions if original_name(i.name) is not None]
        if not recomputed:
            return None
        ms = {i.name: cost(i, program.tensors) for i in recomputed}
        moved = [i.name for i in recomputed if i.kind.is_communication]
        link_ms, peak = sum(ms[name] for name in moved), peak_memory(program)
        return cls(
            len(recomputed),
            sum(i.kind is Kind.ALL_TO_ALL for i in recomputed),
            sum(ms.values()) - link_ms,
            link_ms,
            peak / 1e9,
            (peak_memory(_with_saved_activations(program)) - peak) / 1e9,
        )

    def text(self) -> str:
        """One line."""
        return (
            f"Recomputed in the backward (activation checkpointing): {self.instructions} instructions, "
            f"{self.all_to_alls} of them all-to-alls: {self.compute_ms:.2f} ms of computation and "
            f"{self.link_ms:.2f} ms on the link, for {self.saved_gb:.3g} GB less of "
            f"{self.peak_memory_gb + self.saved_gb:.3g} GB in the original order."
        )


def _with_saved_activations(program: Program) -> Program:
    """The Program whose backward reads the results of the forward in place of recomputed ones."""
    result_of: dict[str, str] = {}
    kept = []
    for instruction in program.instructions:
        original = original_name(instruction.name)
        if original is None:
            inputs = tuple(dict.fromkeys(result_of.get(t, t) for t in instruction.inputs))
            kept.append(replace(instruction, inputs=inputs, after=""))
        else:
            outputs = program.instructions[program.index[original]].outputs
            result_of.update(zip(instruction.outputs, outputs, strict=True))
    tensors = {
        t: replace(spec, alias_of=result_of.get(spec.alias_of, spec.alias_of)) if spec.alias_of else spec
        for t, spec in program.tensors.items()
        if t not in result_of
    }
    return replace(program, instructions=tuple(kept), tensors=tensors)
