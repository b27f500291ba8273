"""Compares a training step on several ranks with the same step on one: the first difference, and its kind.

    reference = on_one_rank(model, inputs, ranks)        the whole batch, and slice by slice, on one rank
    comparison = on_this_rank(model, inputs, reference)  one slice, with the same weights, on each rank
    first_of(comparisons of all ranks)

Two steps run on the same batch, the second with other weights, so that stale values show. Loss and gradients
reveal that something is wrong; the outputs of submodules in the forward, where it began.

Right is: the mean (or the sum) of the ranks' losses is the loss of the whole batch, and each rank has its
part of the gradient of that. Where the loss depends on how a batch is cut (by a load-balance loss or a
capacity of each rank), the mean over the slices is right, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lancet_kernels.errors import UserError
from lancet_kernels.layer.expert_layer import ExpertLayer
from lancet_kernels.layer.gradients import local_tensor
from lancet_kernels.measure.difference_kinds import (
    KEPT,
    OTHER,
    Call,
    Kind,
    is_close,
    kind_of_gradient,
    kind_of_output,
)
from lancet_kernels.ops.comm.groups import EXPERT_GROUP, group_name, group_rank, over_ranks
from lancet_kernels.ops.moe.gates import GATES
from lancet_kernels.optimization.guards import as_arguments
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.paired import loss_of

Inputs = Sequence[object] | Mapping[str, object]
STEPS = 2
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Attributes in which wrappers (DistributedDataParallel, torch.compile, checkpointing) hold their module."""
_RATE = 0.1
"""Change of a weight between the steps, relative to its norm."""


@dataclass
class Run:
    """A forward and backward. gradients: by parameter. calls: in the order in which they ended."""

    loss: float
    gradients: dict[str, Tensor | None]
    calls: list[Call]


@dataclass
class ReferenceStep:
    """A step on one rank. parameters: before it. whole: on the whole batch. slices: on each rank's slice."""

    parameters: dict[str, Tensor]
    whole: Run
    slices: list[Run]


@dataclass
class Reference:
    buffers: dict[str, Tensor]
    steps: list[ReferenceStep]


@dataclass(frozen=True)
class Difference:
    """place: a submodule, a parameter, or the loss. order: position in the computation of a step."""

    step: int
    order: int
    phase: str
    place: str
    kind: str
    what: str


@dataclass
class Comparison:
    """One rank's result. loss: the mean over the ranks in each step. by_slices: parameters whose gradient is
    the mean of the slices', and not that of the whole batch."""

    loss: list[float]
    parameters: int
    by_slices: list[str]
    differences: list[Difference]


def on_one_rank(model: nn.Module, inputs: Inputs, ranks: int) -> Reference:
    """Run the steps on one rank, which changes the model's weights.

    Raises: UserError for a batch that cannot be cut into slices for the ranks, and for a step that draws
        random numbers.
    """
    slices = [slice_of(inputs, ranks, rank) for rank in range(ranks)]
    buffers = {name: b.detach().clone() for name, b in _named(model.named_buffers())}
    _check_deterministic(model, inputs, buffers)
    steps = []
    for _ in range(STEPS):
        parameters = {name: p.detach().cpu().clone() for name, p in _named(_parameters(model))}
        runs = [_run(model, one, buffers) for one in slices]
        steps.append(ReferenceStep(parameters, _run(model, inputs, buffers), runs))
        _move(model)
    return Reference({name: buffer.cpu() for name, buffer in buffers.items()}, steps)


def on_this_rank(model: nn.Module, inputs: Inputs, reference: Reference) -> Comparison:
    """Run the same steps on each of several ranks, on the slice of this one. Collective.

    Args: inputs: those of the reference, the whole batch.
    Raises: UserError for parameters that are not those of one rank or a part of them, CommunicationError.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own_inputs = slice_of(inputs, ranks, rank)
    parameters = dict(_named(_parameters(model)))
    own_part = {
        name: functools.partial(_own_part, name, parameter, _expert_rank(model, name))
        for name, parameter in parameters.items()
    }
    result = Comparison([], len(parameters), [], [])
    before: ReferenceStep | None = None
    for number, expected in enumerate(reference.steps, 1):
        _load(parameters, own_part, expected.parameters)
        buffers = {n: reference.buffers[n].to(b.device) for n, b in _named(model.named_buffers())
                   if n in reference.buffers and reference.buffers[n].shape == b.shape}  # fmt: skip
        run = _run(model, own_inputs, buffers)
        steps = expected if before is None else before, expected
        _compare(number, run, rank, steps, own_part, result)
        before = expected
    return result


def first_of(comparisons: Sequence[Comparison]) -> tuple[Difference, dict[int, str]] | None:
    """The first difference of all ranks, and its `what` on each rank that has it; None: there is none."""
    every = [(d.step, d.order, d.place, r) for r, one in enumerate(comparisons) for d in one.differences]
    if not every:
        return None
    step, _, place, first_rank = min(every)
    by_rank = [[d for d in one.differences if (d.step, d.place) == (step, place)] for one in comparisons]
    first = by_rank[first_rank][0]
    return first, {rank: d.what for rank, own in enumerate(by_rank) for d in own if d.kind == first.kind}


def slice_of(inputs: Inputs, ranks: int, rank: int) -> Inputs:
    """A rank's slice of a batch, of each tensor that is as long as the first one."""
    leaves, structure = pytree.tree_flatten(inputs)
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or sizes[0] % ranks or not sizes[0]:
        raise UserError(
            f"batch for {ranks} ranks",
            got=f"{sizes[0]} along its first dimension" if sizes else "no tensor",
            expected=f"a multiple of {ranks}: it is the batch of all ranks, and each gets an equal slice",
            do="return a larger batch, or use fewer --ranks",
        )
    own = slice(sizes[0] // ranks * rank, sizes[0] // ranks * (rank + 1))
    cut = [x[own] if isinstance(x, Tensor) and x.dim() and len(x) == sizes[0] else x for x in leaves]
    return pytree.tree_unflatten(cut, structure)


def _check_deterministic(model: nn.Module, inputs: Inputs, buffers: Mapping[str, Tensor]) -> None:
    losses = [_run(model, inputs, buffers, seed=seed, watch=False).loss for seed in (1, 2)]
    if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
        raise UserError(
            "the step", got=f"a loss of {losses[0]:.6g}, then of {losses[1]:.6g} with another seed",
            expected="a step without random numbers, or ranks draw others than one rank",
            do="set dropout to 0, or return the model in eval mode",
        )  # fmt: skip


def _run(
    model: nn.Module, inputs: Inputs, buffers: Mapping[str, Tensor], seed: int = 0, watch: bool = True
) -> Run:
    """A forward and backward from these values of the buffers."""
    for name, buffer in _named(model.named_buffers()):
        if name in buffers:
            buffer.detach().copy_(buffers[name])
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    arguments, by_name = as_arguments(inputs)
    calls: list[Call] = []
    with contextlib.ExitStack() as stack:
        # A plan does not run with hooks that its trace did not have.
        if watch and not any(isinstance(module, OptimizedModule) for module in model.modules()):
            calls = stack.enter_context(_watched(model))
        output = model(*arguments, **by_name)
    loss = loss_of((output, getattr(output, "loss", None)), "the module")
    loss.backward()
    gradients = {name: _local_gradient(p) for name, p in _named(_parameters(model))}
    return Run(float(loss.detach()), gradients, calls)


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[Call]]:
    """A context that records the outputs of submodules and the choices of their gates, in the order in which
    calls end."""
    calls: list[Call] = []
    running: list[Call] = []

    def enter(name: str, *_: object) -> None:
        running.append(Call(name))

    def leave(_module: nn.Module, args: tuple, by_name: dict, output: object) -> None:
        call = running.pop()
        outputs = _tensors(output)
        call.values = [t.detach().to("cpu", copy=True) for t in outputs if t.is_floating_point()]
        for tensor in (*_tensors((args, by_name)), *outputs):
            if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                call.choices.append(tensor.to("cpu", copy=True))
        calls.append(call)

    with contextlib.ExitStack() as stack:
        for name, module in _named(model.named_modules()):
            stack.enter_context(module.register_forward_pre_hook(functools.partial(enter, name)))
            stack.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        for gate in GATES.values():
            stack.enter_context(mock.patch.object(gate, "select", _recording(gate.select, running)))
        yield calls


def _recording(select: Any, running: list[Call]) -> Any:
    def recording(*args: Any) -> Tensor:
        expert_TK = select(*args)
        if running:
            running[-1].choices.append(expert_TK.to("cpu", copy=True))
        return expert_TK

    return recording


def _tensors(values: object) -> list[Tensor]:
    """Tensors with dimensions in arguments or results, without DTensors, of which a rank has a part only."""
    leaves = pytree.tree_leaves(values)
    return [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, DTensor) and t.dim()]


def _named(pairs: Any) -> Iterator[tuple[str, Any]]:
    """Without the names of wrappers."""
    for name, value in pairs:
        yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), value


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()
    return None if gradient is None else gradient.detach().to("cpu", copy=True)


@torch.no_grad()
def _move(model: nn.Module) -> None:
    """Change the weights along their gradients."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and (norm := float(gradient.norm())):
            parameter.add_(gradient, alpha=-_RATE * (float(parameter.norm()) or 1.0) / norm)


def _expert_rank(model: nn.Module, name: str) -> int | None:
    """This rank in the expert group of a parameter of experts; None for any other parameter."""
    modules = dict(_named(model.named_modules()))
    while name:
        name = name.rpartition(".")[0]
        module = modules.get(name)
        if isinstance(module, ExpertLayer):
            return module.rank
        if module is not None and EXPERT_GROUP in module.__dict__:
            return group_rank(module.__dict__[EXPERT_GROUP])
    return None


def _own_part(name: str, parameter: nn.Parameter, expert_rank: int | None, whole: Tensor) -> Tensor:
    """This rank's part of `whole`, the parameter's tensor on one rank.

    Raises: UserError for a parameter that is no equal part of it along one dimension.
    """
    shape = parameter.shape
    parts = [w // own if own and w % own == 0 else 0 for w, own in zip(whole.shape, shape, strict=False)]
    cut = [dim for dim, number in enumerate(parts) if number != 1]
    if len(parts) != whole.dim() or len(shape) != whole.dim() or 0 in parts or len(cut) > 1:
        raise UserError(
            f"parameter {name}", got=f"{list(shape)} on each of several ranks, {list(whole.shape)} on one",
            expected="the same, or equal parts along one dimension",
            do="let make_step build the same model for any number of ranks",
        )  # fmt: skip
    for dim in cut:
        number = expert_rank if expert_rank is not None else dist.get_rank() % parts[dim]
        whole = whole.narrow(dim, number * shape[dim], shape[dim])
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(
        whole.to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return everywhere.redistribute(mesh, parameter.placements).to_local().to("cpu", copy=True)


@torch.no_grad()
def _load(parameters: Mapping[str, nn.Parameter], own_part: Mapping[str, Any], wholes: Mapping) -> None:
    if parameters.keys() != wholes.keys():
        own, other = sorted(parameters.keys() - wholes.keys()), sorted(wholes.keys() - parameters.keys())
        raise UserError(
            "parameters of several ranks", got=f"{own[0]}, which one rank lacks" if own else f"no {other[0]}",
            expected="those of one rank", do="let make_step build the same model for any number of ranks",
        )  # fmt: skip
    for name, parameter in parameters.items():
        local_tensor(parameter).copy_(own_part[name](wholes[name]))


def _compare(
    number: int,
    run: Run,
    rank: int,
    steps: tuple[ReferenceStep, ReferenceStep],
    own_part: Mapping[str, Any],
    result: Comparison,
) -> None:
    """Add the differences of a step of this rank to the result. Collective."""
    before, expected = steps
    calls = expected.slices[rank].calls
    differences = []
    if (loss := _compare_losses(run.loss, expected, result)) is not None:
        differences.append(Difference(number, len(calls), "forward", "loss", *loss))
    order_of = {call.name: 2 * len(calls) - place for place, call in enumerate(calls)}
    largest = max((float(g.norm()) for g in expected.whole.gradients.values() if g is not None), default=0.0)
    for place, (name, gradient) in enumerate(run.gradients.items()):
        whole, *parts = (_gradient(one, name, expected) for one in (expected.whole, *expected.slices))
        right, *own_parts = (own_part[name](one) for one in (whole, *parts))
        own = torch.zeros_like(right) if gradient is None else gradient
        if is_close(own, right, largest):
            continue
        if is_close(own, sum(own_parts[1:], own_parts[0]) / len(parts), largest):
            result.by_slices.append(name)
            continue
        earlier = [] if before is expected else [_gradient(one, name, before) for one in before.slices]
        kind = kind_of_gradient(own, right, own_parts, [own_part[name](one) for one in earlier], whole)
        owner = name
        while owner and owner not in order_of:
            owner = owner.rpartition(".")[0]
        order = order_of.get(owner, 2 * len(calls) + len(run.gradients) - place)
        differences.append(Difference(number, order, "gradient", name, *kind))
    if differences and (call := _first_call(run.calls, before.slices[rank].calls, calls)) is not None:
        place, name, kind = call
        differences.append(Difference(number, place, "forward", name, *kind))
    if before is not expected and not result.differences:
        differences = [replace(d, kind="stale", what=KEPT) if d.kind == OTHER else d for d in differences]
    result.differences += differences


def _gradient(run: Run, name: str, step: ReferenceStep) -> Tensor:
    """Zero where there is none."""
    gradient = run.gradients[name]
    return torch.zeros_like(step.parameters[name]) if gradient is None else gradient


def _compare_losses(own: float, expected: ReferenceStep, result: Comparison) -> Kind | None:
    """Compare the mean of the ranks' losses, or their sum, with the loss of one rank. Collective."""
    mean = float(over_ranks(torch.tensor(own, dtype=torch.float64), group_name(None), "mean", "mean loss"))
    result.loss.append(mean)
    mean_of_slices = sum(run.loss for run in expected.slices) / len(expected.slices)
    dtype = next(iter(expected.parameters.values())).dtype
    pairs = itertools.product((mean, mean * len(expected.slices)), (expected.whole.loss, mean_of_slices))
    if any(is_close(torch.tensor(a).to(dtype), torch.tensor(b).to(dtype)) for a, b in pairs):
        return None
    return Kind(OTHER, f"{mean:.6g}, not {expected.whole.loss:.6g}")


def _first_call(
    own: Sequence[Call], before: Sequence[Call], expected: Sequence[Call]
) -> tuple[int, str, Kind] | None:
    """Place, name and kind of the first submodule whose output differs from that on one rank."""
    own_by_key, before_by_key = _numbered(own), _numbered(before)
    for place, (key, right) in enumerate(_numbered(expected).items()):
        # Submodules of experts get other rows on every rank.
        if key in own_by_key and "experts" not in right.name.split(".")[:-1]:
            kind = kind_of_output(own_by_key[key], right, before_by_key.get(key, right))
            if kind is not None:
                return place, right.name or "the module", kind
    return None


def _numbered(calls: Sequence[Call]) -> dict[tuple[str, int], Call]:
    """Calls by name and number of earlier calls of that name."""
    numbers: Counter[str] = Counter()
    by_key = {}
    for call in calls:
        by_key[call.name, numbers[call.name]] = call
        numbers[call.name] += 1
    return by_key
