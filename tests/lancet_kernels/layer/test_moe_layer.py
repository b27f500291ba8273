"""Checkpointed blocks whose router chooses otherwise when they run again in the backward: gradients of
the first run."""

import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from lancet_kernels import MoELayer
from lancet_kernels.layer.moe_layer import CheckpointedRun
from tests.grids import few_of

D, E, T = 8, 8, 12
KINDS: dict[str, dict] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.sort.default, torch.ops.aten.mm.default]
        ),
    },
}


class Undecided(nn.Module):
    """A linear layer, and experts of which each two have equal logits, but for noise that is drawn anew in
    each call: another one of the two wins."""

    def __init__(self, layer: dict, dtype: torch.dtype, **checkpointed: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(D, D)
        self.logits = nn.Linear(D, E // 2, bias=False)
        self.layer = MoELayer(D, 12, E, **{"top_k": 3, "gate": "topk", "capacity_factor": 1.0, **layer})
        self.checkpointed = checkpointed
        self.to(dtype)
        self.noise, self.noise_again = torch.Generator(), torch.Generator().manual_seed(99)
        with torch.no_grad():
            for w in (self.layer.w1, self.layer.w2):
                w.mul_(50)

    def block(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        logits = self.logits(h).repeat_interleave(2, -1)
        generator = self.noise if torch._C._current_graph_task_id() == -1 else self.noise_again
        noise = torch.rand(logits.shape, generator=generator, dtype=logits.dtype)
        size = 1e-12 if logits.dtype == torch.float64 else 1e-5
        return x + self.layer(h, logits_TE=logits + size * noise)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, **self.checkpointed) if self.checkpointed else self.block(x)


Passes = Callable[[Undecided, list[Tensor]], None]


def one_after_the_other(module: Undecided, batches: list[Tensor]) -> None:
    for x in batches:
        module(x).square().sum().backward()


def all_forwards_first(module: Undecided, batches: list[Tensor]) -> None:
    """As in a pipeline, whose backwards come in the order of the forwards."""
    results = [module(x) for x in batches]
    for y in results:
        y.square().sum().backward()


def twice_in_a_row(module: Undecided, batches: list[Tensor]) -> None:
    """A layer that the model runs several times."""
    y = batches[0]
    for _ in range(3):
        y = module(y)
    y.square().sum().backward()


def twice_in_a_block(module: Undecided, batches: list[Tensor]) -> None:
    kept, module.checkpointed = module.checkpointed, {}
    both = lambda x: module(module(x))  # noqa: E731
    y = checkpoint(both, batches[0], **kept) if kept else both(batches[0])
    y.square().sum().backward()
    module.checkpointed = kept


def nested(module: Undecided, batches: list[Tensor]) -> None:
    outer = {name: module.checkpointed[name] for name in ("use_reentrant",) if module.checkpointed}
    both = lambda x: module(torch.sin(module(x)))  # noqa: E731
    y = checkpoint(both, batches[0], **outer) if outer else both(batches[0])
    y.square().sum().backward()


def two_backwards(module: Undecided, batches: list[Tensor]) -> None:
    """Two backwards of one graph."""
    y = module(batches[0]).square().sum()
    y.backward(retain_graph=True)
    y.backward()


def without_early_stop(module: Undecided, batches: list[Tensor]) -> None:
    with set_checkpoint_early_stop(False):
        one_after_the_other(module, batches)


PASSES = (
    one_after_the_other,
    all_forwards_first,
    twice_in_a_row,
    twice_in_a_block,
    nested,
    two_backwards,
    without_early_stop,
)
LAYERS = {
    "topk": {},
    "dropless": {"capacity_factor": None},
    "float32": {"capacity_factor": None, "dtype": torch.float32},  # eager_experts
    "sigmoid": {"gate": "sigmoid"},
    "batch-prioritized": {"gate": "batch-prioritized"},
}


def gradients(module: Undecided, passes: Passes, seed: int) -> list[Tensor]:
    """Gradients of the parameters, then of the inputs; in every call the first runs have the same noise."""
    module.zero_grad()
    module.noise.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = module.linear.weight.dtype
    batches = [torch.randn(T, D, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]
    passes(module, batches)
    every = [*module.parameters(), *batches]
    return [tensor.grad.clone() for tensor in every if tensor.grad is not None]


def compare(passes: Passes, kind: str, layer: dict, rank_seed: int = 0) -> list[float]:
    """How far gradients of the checkpointed module are from those of the plain one."""
    layer = dict(layer)
    dtype = layer.pop("dtype", torch.float64)
    plain, checkpointed = (Undecided(layer, dtype, **options) for options in ({}, KINDS[kind]))
    pairs = zip(gradients(plain, passes, rank_seed), gradients(checkpointed, passes, rank_seed), strict=True)
    return [float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested, use_reentrant=True
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", PASSES, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_first_run(passes: Passes, kind: str) -> None:
    if kind == "selective" and passes is two_backwards:
        pytest.skip("torch saves what it selects for one backward")
    assert max(compare(passes, kind, {})) < 1e-9


@pytest.mark.parametrize("name", LAYERS)
def test_every_way_to_route(name: str) -> None:
    for kind in KINDS:
        distance = max(compare(all_forwards_first, kind, LAYERS[name]))
        assert distance < (1e-4 if name == "float32" else 1e-9), kind


def test_without_what_is_kept_they_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router does choose otherwise (not where its sort is saved)."""
    monkeypatch.setattr(CheckpointedRun, "as_at_first", lambda _run, _layer, value: value)
    for kind in ("reentrant", "not reentrant"):
        assert max(compare(one_after_the_other, kind, {"capacity_factor": None})) > 1e-3


def on_rank(kind: str) -> list[float]:
    seed = torch.distributed.get_rank()
    return [
        distance
        for layer in ({}, {"capacity_factor": None})
        for passes in (one_after_the_other, all_forwards_first)
        for distance in compare(passes, kind, layer, seed)
    ]


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_on_two_ranks(pool, kind: str) -> None:
    assert max(max(distances) for distances in pool.run(on_rank, kind, ranks=2)) < 1e-9


@pytest.mark.parametrize("kind", few_of(KINDS, 1))
def test_nothing_is_kept_longer_than_the_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref] = []
    as_at_first = CheckpointedRun.as_at_first

    def watched(run: CheckpointedRun, layer: nn.Module, value: object) -> object:
        if isinstance(value, Tensor):
            kept.append(weakref.ref(value))
        return as_at_first(run, layer, value)

    monkeypatch.setattr(CheckpointedRun, "as_at_first", watched)
    module = Undecided({}, torch.float64, **KINDS[kind])
    y = module(torch.randn(T, D, dtype=torch.float64).requires_grad_()).sum()
    assert kept
    assert all(one() is not None for one in kept)
    y.backward()
    del y
    gc.collect()
    assert all(one() is None for one in kept)
