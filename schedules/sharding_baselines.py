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

REPLICATED = "replicated"


def data_parallel(program: Program, ranks: int) -> Restriction:
    """Every parameter whole on every rank; no collective but the all-reduce of gradients."""
    return Restriction(lambda name, form: not form.is_cut, frozenset(), _is_shared)


def expert_parallel(program: Program, ranks: int) -> Restriction:
    """GShard's: experts on their ranks, all else data parallel, all-to-alls between. Parameters with three
    dimensions [E, ., .] are taken for experts. Raises: UserError where there are none for each rank."""
    experts = {t for t in program.parameters if len(program.tensors[t].shape) == 3}
    numbers = sorted({program.tensors[t].shape[0] for t in experts})
    if not experts or any(number % ranks for number in numbers):
        of = f"{' and '.join(map(str, numbers))} experts" if experts else "no parameter [experts, ., .]"
        raise UserError(
            f"expert parallel sharding of {program.name}",
            got=of,
            expected=f"a number of experts that {ranks} ranks divide",
            do="use strategy 'data parallel' or 'hidup'",
        )

    def rests(name: str, form: Form) -> bool:
        return form == cut(0) if name in experts else not form.is_cut

    def reads_own_experts(block: Block, signature: BlockSignature) -> bool:
        pairs = zip(block.parameters, signature.parameters, strict=True)
        return _is_shared(block, signature) and all(form == cut(0) for t, form in pairs if t in experts)

    return Restriction(rests, frozenset({"all_to_all"}), reads_own_experts)


def replicated(program: Program, ranks: int) -> Restriction:
    """Everything whole on every rank."""

    def is_whole(block: Block, signature: BlockSignature) -> bool:
        return all(form == WHOLE for way in signature.ways for form in way)

    return Restriction(lambda name, form: form == WHOLE, frozenset(), is_whole)


def _is_shared(block: Block, signature: BlockSignature) -> bool:
    """Is the work shared out, where it can be? Small models are as fast if every rank computes everything."""

    def cuts(of: BlockSignature) -> bool:
        return any(form.is_cut for form in (*of.reads, *of.makes))

    return cuts(signature) or not any(map(cuts, block.signatures))


BASELINES: dict[str, Callable[[Program, int], Restriction]] = {
    "data parallel": data_parallel,
    "expert parallel": expert_parallel,
    REPLICATED: replicated,
}


def baseline(name: str, program: Program, ranks: int, cost: Cost) -> Strategy:
    """The fastest strategy of a baseline's space. Raises: UserError where it has none for this program, or
    none that shares out the work."""

    def refusal(got: str) -> UserError:
        return UserError(
            f"{name} sharding of {program.name}",
            got=got,
            expected=f"microbatches that {ranks} ranks divide",
            do="choose another batch, or strategy 'hidup'",
        )

    restriction = BASELINES[name](program, ranks)
    try:
        strategy = search_sharding(program, ranks, cost, restriction=restriction, name=name)
    except UserError:
        sizes = [list(program.tensors[t].shape) for t in program.inputs if t not in program.parameter_set]
        raise refusal(f"inputs {', '.join(map(str, sizes))}") from None
    ways = {i: way for stage in strategy.stages for i, way in stage.computation.items()}
    for instruction in program.instructions:
        is_shared = any(form.is_cut for form in ways[instruction.name])
        if instruction.flops and not is_shared and ranks > 1 and name != REPLICATED:
            sizes = [list(program.tensors[t].shape) for t in instruction.inputs]
            raise refusal(f"{instruction.name}, which every rank would compute whole: operands {sizes}")
    return strategy
