"""The strategies that people choose by hand, as restrictions of the search."""

from __future__ import annotations

from collections.abc import Callable

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.forms import WHOLE, Form, cut
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.blocks import Block, BlockSignature
from lancet_kernels.schedules.sharding import Strategy, search_sharding
from lancet_kernels.schedules.sharding_search import Restriction


def data_parallel(program: Program) -> Restriction:
    """Every parameter whole on every rank; no collective but the all-reduce of gradients."""
    return Restriction(lambda name, form: not form.is_cut, frozenset())


def expert_parallel(program: Program) -> Restriction:
    """GShard's: experts on their ranks, all else data parallel, all-to-alls between. Parameters with three
    dimensions [E, ., .] are taken for experts. Raises: UserError where there are none."""
    experts = {t for t in program.parameters if len(program.tensors[t].shape) == 3}
    if not experts:
        raise UserError(
            f"sharding of {program.name}",
            got="no parameter of three dimensions [experts, ., .]",
            expected="a model with experts, for expert parallelism",
            do="use strategy 'data parallel' or 'hidup'",
        )

    def rests(name: str, form: Form) -> bool:
        return form == cut(0) if name in experts else not form.is_cut

    def reads_own_experts(block: Block, signature: BlockSignature) -> bool:
        pairs = zip(block.parameters, signature.parameters, strict=True)
        return all(form == cut(0) for t, form in pairs if t in experts)

    return Restriction(rests, frozenset({"all_to_all"}), reads_own_experts)


def replicated(program: Program) -> Restriction:
    """Everything whole on every rank."""

    def is_whole(block: Block, signature: BlockSignature) -> bool:
        return all(form == WHOLE for way in signature.ways for form in way)

    return Restriction(lambda name, form: form == WHOLE, frozenset(), is_whole)


BASELINES: dict[str, Callable[[Program], Restriction]] = {
    "data parallel": data_parallel,
    "expert parallel": expert_parallel,
    "replicated": replicated,
}


def baseline(name: str, program: Program, ranks: int, cost: Cost) -> Strategy:
    """The fastest strategy of a baseline's space. Raises: UserError where it has none for this program."""
    return search_sharding(program, ranks, cost, restriction=BASELINES[name](program), name=name)
