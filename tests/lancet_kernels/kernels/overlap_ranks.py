"""What a rank of an overlap test does: passes through exchanges, all of whose buffers are guarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product

import torch
from torch import Tensor

from lancet_kernels.kernels.config import GemmConfig, OverlapConfig
from lancet_kernels.kernels.overlap import DenseGemm, SavedPass, moe_backward, moe_forward
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.symmetric import SharedMemory, SymmetricMemory
from tests.lancet_kernels.kernels.overlap_cases import (
    Answer,
    Case,
    check_close,
    experts_of,
    routing_of,
    stored,
    tokens_of,
)

GUARD, GUARD_BYTE = 64, 0xA5  # bytes before and behind each copy of a region
CONFIG = OverlapConfig(
    GemmConfig(16, 32, 16, 1, 1), put_rows=4, put_block=32, reduce_tokens=4, reduce_block=32
)
DENSE = ((19, 5, 33), (7, 35, 18), (17, 34, 3))  # M, N, K


class GuardedMemory(SharedMemory):
    """Symmetric memory whose copies lie between guard bands."""

    def _allocate(self, request: str, num_bytes: int) -> tuple[Tensor, list[int]]:
        raw, addresses = super()._allocate(request, num_bytes + 2 * GUARD)
        raw[:GUARD] = raw[GUARD + num_bytes :] = GUARD_BYTE
        self.guards = [*getattr(self, "guards", []), raw[:GUARD], raw[GUARD + num_bytes :]]
        return raw[GUARD:-GUARD], [address + GUARD for address in addresses]

    def check_guards(self) -> None:
        assert all((guard == GUARD_BYTE).all() for guard in self.guards), "written beside a region"


@dataclass
class Layer:
    """A case on one rank, with its exchanges: forward, backward."""

    case: Case
    rank: int
    forward: Exchange
    backward: Exchange
    config: OverlapConfig = CONFIG
    experts: object = None
    x: Tensor = None
    dy: Tensor = None
    routing: object = None
    dense: list[DenseGemm] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.experts = experts_of(self.case, self.rank)
        self.load(self.case)

    def load(self, case: Case) -> None:
        """Take the tokens of another case of the same sizes."""
        self.x, self.dy = tokens_of(case, self.rank)
        self.routing = routing_of(case, self.rank)

    def tensors(self) -> list[Tensor]:
        """What a pass reads, but for the independent GEMMs."""
        given = [self.x, self.dy, *vars(self.routing).values(), *vars(self.experts).values()]
        return [t for t in given if isinstance(t, Tensor)]

    def to(self, device: torch.device) -> Layer:
        """Move what a pass reads."""
        self.x, self.dy = self.x.to(device), self.dy.to(device)
        self.routing, self.experts = (
            replace(given, **{name: t.to(device) for name, t in vars(given).items() if isinstance(t, Tensor)})
            for given in (self.routing, self.experts)
        )
        self.dense = [DenseGemm(*(t.to(device) for t in (d.a, d.b, d.c))) for d in self.dense]
        return self

    def run_forward(self) -> tuple[Tensor, SavedPass]:
        return moe_forward(self.forward, self.x, self.routing, self.experts, self.config, dense=self.dense)

    def run_backward(self, saved: SavedPass) -> object:
        given = self.dy, self.routing, self.experts, self.config
        made = moe_backward(self.forward, saved, self.backward, *given, dense=self.dense)
        self.forward.release(saved.opened)
        return made

    def run(self) -> Answer:
        out, saved = self.run_forward()
        return answer_of(out, self.run_backward(saved))

    def check(self) -> None:
        self.forward.check()
        self.backward.check()


def answer_of(out: Tensor, made: object) -> Answer:
    return Answer(out, made.dx, made.dweight, made.dw1, made.dw2, made.db1, made.db2)


def make_exchange(memory: SymmetricMemory, name: str, case: Case, **changes: object) -> Exchange:
    """An exchange whose rows and results are NaN."""
    sizes = {
        "local_experts": case.local, "send_rows": case.send_rows, "receive_rows": case.receive_rows,
        "width": case.width, "dtype": case.dtype, "chunk_rows": 16, "timeout_s": 15.0,
    }  # fmt: skip
    exchange = Exchange(memory, name, **sizes | changes)
    for region in (exchange.rows, exchange.results):
        region.local.fill_(float("nan"))
    return exchange


def make_layer(memory: SymmetricMemory, name: str, case: Case, **changes: object) -> Layer:
    """Collective. Returns when every rank has poisoned its regions. changes: of the configuration."""
    made = [make_exchange(memory, f"{name}.{way}", case) for way in ("forward", "backward")]
    memory.barrier()
    return Layer(case, memory.rank, *made, replace(CONFIG, **changes))


def virtual_layers(
    memories: Sequence[SymmetricMemory], case: Case, config: OverlapConfig, timeout_s: float
) -> list[Layer]:
    """A layer of every PE of this process."""
    sizes = {"chunk_rows": config.gemm.block_m, "timeout_s": timeout_s}
    by_way = [
        [make_exchange(memory, way, case, **sizes) for memory in memories] for way in ("forward", "backward")
    ]
    return [Layer(case, rank, *ways, config) for rank, ways in enumerate(zip(*by_way, strict=True))]


def make_dense(dtype: torch.dtype, sizes: tuple[tuple[int, int, int], ...] = DENSE) -> list[DenseGemm]:
    """Independent GEMMs, odd in size unless `sizes` says otherwise, into NaN."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for m, n, k in sizes:
        a, b = (torch.randn(k, columns, generator=generator).to(dtype) for columns in (m, n))
        made.append(DenseGemm(a, b, torch.empty_like(torch.zeros(m, n, dtype=dtype))))
    return made


def check_dense(gemms: list[DenseGemm], say: str = "") -> None:
    for gemm in gemms:
        a, b = gemm.a.cpu(), gemm.b.cpu()
        exact, same = a.T.double() @ b.double(), stored(a.T.float() @ b.float(), a.dtype)
        check_close(gemm.c, exact, same, f"{say}: independent GEMM")


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


def check_same(a: Answer, b: Answer, say: str) -> None:
    for each in fields(Answer):
        assert same_bits(getattr(a, each.name), getattr(b, each.name)), f"{say}: {each.name} differs"


def received(case: Case, rank: int) -> list[Tensor]:
    """Rows of x and of dy that come to a rank, in order, and what they count."""
    rows: list[list[Tensor]] = [[], [], []]
    for e, source in product(range(rank * case.local, (rank + 1) * case.local), range(case.world)):
        routing, (x, dy) = routing_of(case, source), tokens_of(case, source)
        first = int(routing.count[:e].sum())
        choice = routing.choice[first : first + int(routing.count[e])].long()
        token = choice // case.choices
        for of, value in zip(rows, (x[token], dy[token], routing.weight.view(-1)[choice]), strict=True):
            of.append(value)
    return [torch.cat(each) for each in rows]


def check_rows(layer: Layer) -> None:
    """After one pass: the rows here are the sources' rows, bit for bit, and nothing else was written."""
    x_rows, dy_rows, weights = received(layer.case, layer.rank)
    for exchange, expected in ((layer.forward, x_rows), (layer.backward, dy_rows)):
        # The first pass lies in front.
        rows = exchange.rows.local
        assert same_bits(rows[: len(expected)], expected), f"rows of {exchange.name} of rank {layer.rank}"
        assert rows[len(expected) :].isnan().all(), f"behind the rows of {exchange.name} of rank {layer.rank}"
    assert same_bits(layer.backward.row_weights.local[: len(weights)], weights)
    sent = int(layer.routing.count.sum())
    for exchange in (layer.forward, layer.backward):
        results = exchange.results.local
        assert results[:sent].isfinite().all(), f"results of {exchange.name} of rank {layer.rank}"
        assert results[sent:].isnan().all(), f"behind the results of {exchange.name} of rank {layer.rank}"


def check_results(layer: Layer, other: Layer) -> None:
    """After one pass: what came back is what came back to `other`, the same pass in another way."""
    for mine, theirs in ((layer.forward, other.forward), (layer.backward, other.backward)):
        assert same_bits(mine.results.local, theirs.results.local), f"results of {mine.name}"
