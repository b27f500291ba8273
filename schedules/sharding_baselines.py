"""What do people choose by hand? Shardings that a search is compared with.

replicated        every rank computes everything
data parallel     every weight whole on every rank, each its own part of the batch, gradients summed
expert parallel   GShard's: experts on their ranks between two all-to-alls, all else data parallel
"""

from __future__ import annotations

from collections.abc import Collection

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.forms import WHOLE, Form, cut
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.blocks import Block, BlockSignature
from lancet_kernels.schedules.sharding import Strategy, search_sharding
from lancet_kernels.schedules.sharding_states import Restriction

BASELINES = ("replicated", "data parallel", "expert parallel")
EXPERT_DIMENSIONS = 3
"""Of an expert weight: experts, then a matrix."""


def baseline(
    name: str, program: Program, ranks: int, cost: Cost, experts: Collection[str] | None = None
) -> Strategy:
    """The best strategy of that kind, both microbatches in turns.

    Args: experts: names of expert weights, whose first dimension is the expert (default: all parameters with
        three dimensions). Raises: UserError: unknown name; the program cannot run so.
    """
    if name not in BASELINES:
        raise UserError(
            "baseline", got=name, expected=f"one of {', '.join(BASELINES)}", do="name one of these"
        )
    if experts is None:
        experts = [t for t in program.parameters if len(program.tensors[t].shape) == EXPERT_DIMENSIONS]
    restriction = {
        "replicated": Restriction(_rests_whole, frozenset(), _computes_everything),
        "data parallel": Restriction(_rests_whole, frozenset()),
        "expert parallel": _expert_parallel(frozenset(experts)),
    }[name]
    return search_sharding(program, ranks, cost, restriction=restriction, name=name)


def compared(strategy: Strategy, program: Program, cost: Cost) -> str:
    """A strategy beside the baselines that can run, as text."""
    rows = [strategy]
    for name in BASELINES:
        try:
            rows.append(baseline(name, program, strategy.ranks, cost))
        except UserError:
            continue
    lines = [f"{'sharding':<18}{'ms':>10}{'computation':>13}{'communication':>15}{'GB a device':>13}"]
    lines += [
        f"{s.name:<18}{s.predicted_ms:>10.2f}{s.computation_ms:>13.2f}{s.communication_ms:>15.2f}"
        f"{s.memory_bytes / 1e9:>13.3g}"
        for s in rows
    ]
    return "\n".join(lines)


def _rests_whole(name: str, form: Form) -> bool:
    return not form.is_cut


def _computes_everything(block: Block, signature: BlockSignature) -> bool:
    return all(form == WHOLE for way in signature.ways for form in way)


def _expert_parallel(experts: frozenset[str]) -> Restriction:
    def rests(name: str, form: Form) -> bool:
        return form == cut(0) if name in experts else not form.is_cut

    def reads_its_experts(block: Block, signature: BlockSignature) -> bool:
        pairs = zip(block.parameters, signature.parameters, strict=True)
        return all(form == cut(0) for t, form in pairs if t in experts)

    return Restriction(rests, frozenset({"all_to_all"}), reads_its_experts)
