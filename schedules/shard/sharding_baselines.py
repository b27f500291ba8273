"""Shardings chosen by hand, with which a search is compared.

replicated        every rank computes everything
data parallel     every weight whole on every rank, each its own part of the batch, gradients summed
expert parallel   GShard's: experts on their ranks between two all-to-alls, all else data parallel
"""

from __future__ import annotations

from dataclasses import replace

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program import Program
from lancet_kernels.graph.rules.rules import WHOLE, Form, cut_along
from lancet_kernels.schedules.shard.blocks import Block, BlockSignature
from lancet_kernels.schedules.shard.sharding_search import search_sharding
from lancet_kernels.schedules.shard.sharding_states import Restriction
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy

REPLICATED = "replicated"
BASELINES = (REPLICATED, "data parallel", "expert parallel")
EXPERT_DIMENSIONS = 3
"""An expert weight has experts, then a matrix."""


def baseline(name: str, program: Program, ranks: int, cost: Cost) -> ShardingStrategy:
    """The best strategy of that kind. Raises: UserError: unknown name; the program cannot run so."""
    check_name("baseline", name, BASELINES)
    return search_sharding(program, ranks, cost, restriction=_restriction(name, program), name=name)


def shared_baseline(name: str, program: Program, ranks: int, cost: Cost) -> ShardingStrategy:
    """The same, for ranks that are to run it: not every rank computes everything, though a small model may be
    as fast so. Raises: UserError where the work cannot be shared out."""
    experts = _experts(program)
    numbers = sorted({program.tensors[t].shape[0] for t in experts})
    if name == REPLICATED:
        return baseline(name, program, ranks, cost)
    if name == "expert parallel" and (not experts or any(number % ranks for number in numbers)):
        raise UserError(
            f"{name} sharding of {program.name}",
            got=f"{' and '.join(map(str, numbers))} experts" if experts else "no parameter [experts, ., .]",
            expected=f"a number of experts that {ranks} ranks divide",
            do="use strategy 'data parallel' or 'hidup'",
        )
    rests = _restriction(name, program)
    restriction = replace(
        rests,
        signature=lambda block, signature: _is_shared(block, signature) and rests.signature(block, signature),
    )
    try:
        return search_sharding(program, ranks, cost, restriction=restriction, name=name)
    except UserError:
        sizes = [list(program.tensors[t].shape) for t in program.inputs if t not in program.parameter_set]
        raise UserError(
            f"{name} sharding of {program.name}",
            got=f"inputs {', '.join(map(str, sizes))}",
            expected=f"microbatches that {ranks} ranks divide, through the whole model",
            do="choose another batch, or strategy 'hidup'",
        ) from None


def _restriction(name: str, program: Program) -> Restriction:
    if name == REPLICATED:
        return Restriction(_rests_whole, frozenset(), _computes_everything)
    if name != "expert parallel":
        return Restriction(_rests_whole, frozenset())
    experts = _experts(program)

    def rests(parameter: str, form: Form) -> bool:
        return form == cut_along(0) if parameter in experts else not form.is_cut

    def reads_its_experts(block: Block, signature: BlockSignature) -> bool:
        pairs = zip(block.parameters, signature.parameters, strict=True)
        return all(form == cut_along(0) for t, form in pairs if t in experts)

    return Restriction(rests, frozenset({"all_to_all"}), reads_its_experts)


def _experts(program: Program) -> frozenset[str]:
    """The expert weights, whose first dimension is the expert: all parameters with three dimensions."""
    return frozenset(t for t in program.parameters if len(program.tensors[t].shape) == EXPERT_DIMENSIONS)


def _rests_whole(_parameter: str, form: Form) -> bool:
    return not form.is_cut


def _computes_everything(_block: Block, signature: BlockSignature) -> bool:
    return all(form == WHOLE for way in signature.ways for form in way)


def _is_shared(block: Block, signature: BlockSignature) -> bool:
    """Is a block's work shared out, where it can be?"""

    def cuts(of: BlockSignature) -> bool:
        return any(form.is_cut for form in (*of.reads, *of.makes))

    return cuts(signature) or not any(map(cuts, block.signatures))
