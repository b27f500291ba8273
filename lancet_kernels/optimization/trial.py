"""How long a step takes on the real ranks: a few steps of each way to run it, in turn.

Measuring leaves no trace: no gradient is put into a parameter, and buffers, inputs and the states of the
random generators are afterwards what they were. Hooks on the parameters themselves are called, as in any
backward.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lancet_kernels.ops.comm.groups import group_of, values_of_ranks
from lancet_kernels.ops.comm.link import link
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.timing import in_turn

WARMUP = 1


def milliseconds_per_step(
    step: CapturedStep, ways: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """As `milliseconds_of`, of forward and backward. Args: ways: run a forward of `step` and return what its
    module does."""
    return milliseconds_of(step, {name: partial(_one_step, step, way) for name, way in ways.items()}, rounds)


def milliseconds_of(
    step: CapturedStep, runs: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """Time by name (`typical`), in each round that of the slowest rank: the same on all ranks. Collective.

    Args: runs: run one step, or several microbatches of it, forward and backward.
    """
    with _without_trace(step):
        own = in_turn(runs, lambda name: _timed(step, runs[name]), rounds, WARMUP, first_changes=True)
    of_ranks = values_of_ranks(own, step.groups.world, "comparison of measured steps")
    return typical(
        {name: [*map(max, zip(*(times[name] for times in of_ranks), strict=True))] for name in runs}
    )


def typical(rounds_ms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The time by name, given that of each round: the median share of a round times the median round.

    A machine whose speed drifts slows all of a round, which leaves its shares as they are, while medians of
    the times may be of rounds of different speeds.
    """
    mean_ms = [statistics.fmean(times) for times in zip(*rounds_ms.values(), strict=True)]
    middle_ms = statistics.median(mean_ms)
    return {
        name: middle_ms * statistics.median(ms / mean for ms, mean in zip(times, mean_ms, strict=True))
        for name, times in rounds_ms.items()
    }


def _timed(step: CapturedStep, run: Callable[[], object]) -> float:
    if step.groups.world:
        world = group_of(step.groups.world)
        with waiting("barrier before a measured step", world):
            dist.barrier(world)
    _finish(step.device)
    with _gradients_aside(step.model):
        begin = time.perf_counter()
        run()
        _finish(step.device)
        return (time.perf_counter() - begin) * 1e3


def _one_step(step: CapturedStep, forward: Callable[[], object]) -> None:
    # Before the forward, in which FSDP puts whole parameters in their place.
    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    results = [r for r in pytree.tree_leaves(forward()) if isinstance(r, Tensor) and r.requires_grad]
    ones = [torch.ones_like(result) for result in results]
    if step.twin is None:
        torch.autograd.grad(results, trained, ones, allow_unused=True)
    else:
        # FSDP scatters what a backward puts into `.grad`.
        torch.autograd.backward(results, ones)


@contextlib.contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """A context that parameters enter without gradients; afterwards they have their former ones."""
    before = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _without_trace(step: CapturedStep) -> Iterator[None]:
    changing = [
        tensor
        for tensor in (*step.model.buffers(), *pytree.tree_leaves(step.arguments))
        if isinstance(tensor, Tensor)
    ]
    before = [tensor.detach().clone() for tensor in changing]
    with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(changing, before, strict=True):
                    tensor.detach().copy_(value)
            link.read()
