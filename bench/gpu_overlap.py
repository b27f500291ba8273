"""Overlap efficiency of the fused kernels: how much of the shorter one of communication and GEMM is hidden?

    eta = max(T_comm, T_gemm) / T_fused      1: the shorter one costs nothing

on W virtual PEs, all at once on one GPU. T_gemm is what torch's `grouped_mm` takes for the same products, of
all PEs in one call and without the activation: that eta has the goals. Beside it stands the eta against the
GEMM stages of our own kernel alone, which says how much is hidden, but not how fast it is.

One pass is launched in several ways, in turn: all stages in one
launch, in the two launches of `split`, and each stage alone. The same kernel runs the same tiles each time,
so results are equal bit for bit (checked), and only the launches' contents differ.

    stage    what it does                           counts as
    put      rows (backward: dy) to peers           T_comm
    in       first GEMM of the rows                 T_gemm
    out      second GEMM, stored at the peer        T_gemm
    wgrad    dW2, dW1                               T_gemm
    reduce   weighted sum of what came back         neither: eta is the lower for it

Rows that travel back are stored by the second GEMM itself. What that costs alone is taken to be what the
same rows cost on their way out: T_comm of a launch with `out` is that of a put of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from gpu_clock import Clock, Times, each_round, spread
from gpu_sizes import Sizes, choices_of_tokens, normal
from held_back import HeldLaunch, held_back
from torch import Tensor
from torch.nn.functional import grouped_mm
from virtual_pes import VirtualPes

from lancet_kernels.kernels.exchange import Exchange
from lancet_kernels.kernels.overlap import default_overlap_config, moe_backward, moe_forward
from lancet_kernels.kernels.overlap_data import ExpertGradients, Experts, Routing
from lancet_kernels.kernels.routing import route_choices
from lancet_kernels.ops.send_rows import send_rows

CAPACITY_FACTOR = 1.25
GOAL, NEXT_GOAL = 0.90, 0.95
# Ways to launch a pass: launches, each with its stages. Every way holds every stage of its direction.
FORWARD = ("put in out reduce", "put in|out reduce", "put|in|out|reduce", "put|in out|reduce")
BACKWARD = (
    "put in out wgrad reduce",
    "put in|out wgrad reduce",
    "put|in|out wgrad|reduce",
    "put|in out wgrad|reduce",
)
# Of swiglu the whole passes, and what their eta needs: every other launch is one more kernel to compile, for
# longer than it is measured.
WHOLE = {"forward": (FORWARD[0], FORWARD[3]), "backward": (BACKWARD[0], BACKWARD[3])}
# (name, direction, fused launch, T_comm: how many puts of the rows, T_gemm: launches)
EFFICIENCIES = (
    ("dispatch + GEMM", "forward", "put in", 1, "in"),
    ("GEMM + combine", "forward", "out reduce", 1, "out"),
    ("layer forward", "forward", "put in out reduce", 2, "in out"),
    ("dispatch + dX", "backward", "put in", 1, "in"),
    ("dX, dW + combine", "backward", "out wgrad reduce", 1, "out wgrad"),
    ("layer backward", "backward", "put in out wgrad reduce", 2, "in out wgrad"),
)


class FusedLayer:
    """One MoE layer of the sizes on W virtual PEs, T / W tokens and E / W experts on each.

    put_tile: rows and columns that a put copies at a time; None: the default. spare_programs: how many fewer
    than fit on the PE's share of the GPU, to leave others room. pes, name: of a layer that shares its PEs.
    """

    def __init__(
        self,
        sizes: Sizes,
        world: int,
        device: torch.device,
        dtype: torch.dtype,
        put_tile: tuple[int, int] | None = None,
        *,
        pes: VirtualPes | None = None,
        spare_programs: int = 0,
        name: str = "",
    ) -> None:
        self.sizes, self.world, self.device = sizes, world, device
        self.pes = pes or VirtualPes(world, device)
        tokens, local = sizes.tokens // world, sizes.experts // world
        self.capacity = math.ceil(CAPACITY_FACTOR * tokens * sizes.choices / sizes.experts)
        config = default_overlap_config(
            sizes.width, sizes.hidden, sizes.activation, dtype, device, pes_here=world
        )
        # One launch for each direction; the ways cut it.
        programs = max(1, config.programs - spare_programs)
        config = replace(
            config, split=False, programs=programs, comm_programs=min(config.comm_programs, programs)
        )
        if put_tile is not None:
            config = replace(config, put_rows=put_tile[0], put_block=put_tile[1])
        self.config = config
        make = {"device": device, "dtype": dtype}
        exchanges = [
            [
                Exchange(
                    memory, name + way, local_experts=local, send_rows=tokens * sizes.choices,
                    receive_rows=world * min(tokens * sizes.choices, local * self.capacity),
                    width=sizes.width, dtype=dtype, chunk_rows=config.gemm.block_m, timeout_s=10.0,
                )
                for memory in self.pes.memories
            ]
            for way in ("forward", "backward")
        ]  # fmt: skip
        self.forwards, self.backwards = exchanges
        self.x, self.dy = (
            [normal(tokens, sizes.width, seed=seed + rank, **make) for rank in range(world)]
            for seed in (0, 100)
        )
        shapes = (local, sizes.width, sizes.wide), (local, sizes.hidden, sizes.width)
        self.experts = [
            Experts(
                normal(*shapes[0], seed=rank + 200, **make), None,
                normal(*shapes[1], seed=rank + 300, **make), None, sizes.activation,
            )
            for rank in range(world)
        ]  # fmt: skip
        self.routings = [self._route(tokens, rank) for rank in range(world)]
        self.rows = sum(int(routing.count.sum()) for routing in self.routings)

    def _route(self, tokens: int, rank: int) -> Routing:
        sizes = self.sizes
        chosen = choices_of_tokens(tokens, sizes.experts, sizes.choices, self.device, seed=rank)
        used = torch.zeros(sizes.experts, dtype=torch.int64, device=self.device)
        routed = route_choices(chosen, used, self.capacity)
        weight = torch.full(chosen.shape, 1.0 / sizes.choices, device=self.device)
        row = send_rows(routed.expert_TK, routed.slot_TK, routed.kept_E)
        return Routing.of(routed.expert_TK, row, weight, routed.kept_E)

    def check(self) -> None:
        """Raise CommunicationError if any wait ran out of time."""
        for exchange in (*self.forwards, *self.backwards):
            exchange.check()

    def forward(self, rank: int):
        return moe_forward(
            self.forwards[rank], self.x[rank], self.routings[rank], self.experts[rank], self.config
        )

    def backward(self, rank: int, saved) -> ExpertGradients:
        return moe_backward(
            self.forwards[rank], saved, self.backwards[rank], self.dy[rank], self.routings[rank],
            self.experts[rank], self.config,
        )  # fmt: skip

    def in_order(self, way: str, begin: Callable[[int], tuple], time_it: Callable) -> tuple[Times, list]:
        """Begin a pass on every PE, launch it the given way. -> ms by launch, what `begin` returned."""

        def held(rank: int) -> tuple[HeldLaunch, tuple]:
            with held_back() as launches:
                begun = begin(rank)
            (launch,) = launches
            return launch, begun

        passes = self.pes.each(held)
        ms = {}
        for stages in way.split("|"):
            ms[stages] = [time_it(lambda names=stages: self.pes.each(lambda rank: passes[rank][0](names)))]
        return ms, [begun for _, begun in passes]


def ways_of(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Ways to launch each direction."""
    return WHOLE if sizes.activation == "swiglu" else {"forward": FORWARD, "backward": BACKWARD}


def one_round(layer: FusedLayer, time_it: Callable[[Callable], float]) -> tuple[dict[str, Times], bool]:
    """Every way of both directions once. -> ms by direction and launch; do all ways give the same bits?"""
    times: dict[str, Times] = {"forward": {}, "backward": {}}
    results: dict[str, list[list[Tensor]]] = {"forward": [], "backward": []}
    saved = []
    for way in ways_of(layer.sizes)["forward"]:
        for rank, (_, earlier) in enumerate(saved):
            with layer.pes.on(rank):
                layer.forwards[rank].release(earlier.use)
        ms, saved = layer.in_order(way, layer.forward, time_it)
        results["forward"].append([out for out, _ in saved])
        # The same launch in two ways: the first one counts.
        times["forward"] = ms | times["forward"]
    for way in ways_of(layer.sizes)["backward"]:
        ms, gradients = layer.in_order(way, lambda rank: layer.backward(rank, saved[rank][1]), time_it)
        results["backward"].append([t for g in gradients for t in (g.dx, g.dw1, g.dw2, g.dweight)])
        times["backward"] = ms | times["backward"]
    for rank, (_, earlier) in enumerate(saved):
        with layer.pes.on(rank):
            layer.forwards[rank].release(earlier.use)
    same = all(
        torch.equal(a, b)
        for ways in results.values()
        for other in ways[1:]
        for a, b in zip(ways[0], other, strict=True)
    )
    return times, same


class GroupedMm:
    """The products of a layer by torch's grouped_mm: the rows of all PEs for all experts in one call each."""

    def __init__(self, layer: FusedLayer) -> None:
        sizes = layer.sizes
        make = {"device": layer.device, "dtype": layer.x[0].dtype}
        count = torch.stack([routing.count for routing in layer.routings]).sum(0)
        self._ends = count.cumsum(0).to(torch.int32)
        rows = int(self._ends[-1])
        self._x, self._dy = (normal(rows, sizes.width, seed=seed, **make) for seed in (0, 1))
        self._hidden = normal(rows, sizes.hidden, seed=2, **make)
        self._pre = normal(rows, sizes.wide, seed=3, **make)
        self._w1 = torch.cat([experts.w1 for experts in layer.experts])
        self._w2 = torch.cat([experts.w2 for experts in layer.experts])

    def work(self, direction: str) -> dict[str, Callable[[], object]]:
        """By stage, as the kernel has them."""
        mm = partial(grouped_mm, offs=self._ends)
        if direction == "forward":
            return {"in": lambda: mm(self._x, self._w1), "out": lambda: mm(self._hidden, self._w2)}
        return {
            "in": lambda: mm(self._dy, self._w2.transpose(1, 2)),
            "out": lambda: mm(self._pre, self._w1.transpose(1, 2)),
            "wgrad": lambda: (mm(self._hidden.t(), self._dy), mm(self._x.t(), self._pre)),
        }


def untimed(work: Callable[[], object]) -> float:
    """For rehearsals."""
    work()
    return 0.0


def measure(clock: Clock, layer: FusedLayer, rounds: int, warmup: int) -> Iterator[dict]:
    """A figure with both its eta for each fused launch."""
    taken: dict[str, Times] = {"forward": {}, "backward": {}}
    theirs: dict[str, Times] = {"forward": {}, "backward": {}}
    same, reference = True, GroupedMm(layer)
    for number in range(warmup + rounds):
        for direction, stage_times in theirs.items():
            for stage, work in reference.work(direction).items():
                elapsed_ms = clock.once(work)
                if number >= warmup:
                    stage_times.setdefault(stage, []).append(elapsed_ms)
        times, equal = one_round(layer, clock.once)
        layer.check()
        same = same and equal
        for direction, ms in times.items() if number >= warmup else ():
            for stages, values in ms.items():
                taken[direction].setdefault(stages, []).extend(values)
    sizes = {**layer.sizes.letters(), "W": layer.world, "C": layer.capacity, "rows": layer.rows}
    for name, direction, fused, puts, gemm in EFFICIENCIES:
        ms = taken[direction]
        if not ms.keys() >= {fused, "put", gemm}:
            continue
        by_torch = each_round(lambda *stages: sum(stages), *(theirs[direction][s] for s in gemm.split()))
        eta = partial(each_round, partial(_eta, puts=puts), ms["put"])
        yield {
            "figure": f"overlap efficiency, virtual PEs on one GPU, {name}",
            "sizes": sizes,
            "name": layer.sizes.name,
            "ms": {
                "fused": spread(ms[fused]),
                "put": spread(ms["put"]),
                "gemm": spread(ms[gemm]),
                "grouped_mm": spread(by_torch),
            },
            "alone_ms": {stages: spread(values) for stages, values in ms.items()},
            "every_way_gives_the_same_bits": same,
            "ratios": [
                {
                    "what": "eta against grouped_mm",
                    "value": spread(eta(by_torch, ms[fused])),
                    "goal": GOAL,
                    "next_goal": NEXT_GOAL,
                },
                {
                    "what": "eta against our own tiles",
                    "value": spread(eta(ms[gemm], ms[fused])),
                    "goal": None,
                },
            ],
        }


def _eta(comm_ms: float, gemm_ms: float, fused_ms: float, puts: int) -> float:
    return max(puts * comm_ms, gemm_ms) / fused_ms


def put_once(layer: FusedLayer, time_it: Callable[[Callable], float] = untimed) -> list[float]:
    """One pass of which only the rows travel: it is over when they are there. -> ms."""
    ms, saved = layer.in_order("put", layer.forward, time_it)
    for rank, (_, earlier) in enumerate(saved):
        with layer.pes.on(rank):
            layer.forwards[rank].release(earlier.use)
    return ms["put"]


def measure_put(
    clock: Clock, layer: FusedLayer, rounds: int, warmup: int, goal: float | None
) -> Iterator[dict]:
    """Rows through the put task against a device-to-device copy of as many bytes."""
    sizes, config = layer.sizes, layer.config
    source = torch.empty(layer.rows, sizes.width, dtype=layer.x[0].dtype, device=layer.device)
    target = torch.empty_like(source)
    taken: Times = {"put": [], "copy": []}
    for number in range(warmup + rounds):
        put_ms = put_once(layer, clock.once)
        copy_ms = clock.once(lambda: target.copy_(source))
        if number >= warmup:
            taken["put"] += put_ms
            taken["copy"].append(copy_ms)
    layer.check()
    size = source.numel() * source.element_size()
    yield {
        "figure": f"put bandwidth, tile {config.put_rows}x{config.put_block}",
        "sizes": {**sizes.letters(), "W": layer.world, "rows": layer.rows, "bytes": size},
        "name": sizes.name,
        "ms": {name: spread(values) for name, values in taken.items()},
        "gb_per_s": {name: size / spread(values)["median"] * 1e-6 for name, values in taken.items()},
        "ratios": [
            {
                "what": f"rate over a device copy, {layer.world} PEs",
                "value": spread(each_round(lambda a, b: b / a, taken["put"], taken["copy"])),
                "goal": goal,
            }
        ],
    }
