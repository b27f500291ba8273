"""PrimePar's evaluation (ASPLOS '24, slides) by simulation: throughput, memory, MLP blocks.

Blocks at their real sizes, under the best partitions of the whole space and under Megatron's. A block is a
graph for `schedules.shard.segments`:

    0 add  1 norm  2 qkv  3 attention  4 projection  5 add  6 norm  7 fc1  8 activation  9 fc2  10 add

Operator 0 is the last one of the preceding block. Attention is one operator, cut along batch and heads only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.papers.report import Chart, Data, Exhibit, Run, Span
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.graph.rules.slices import BACKWARD, FORWARD, GRADIENT, Partition, split, square
from lancet_kernels.schedules.shard.partition_costs import (
    Operator,
    PartitionCost,
    linear,
    phase_times,
    pointwise,
    redistributions,
)
from lancet_kernels.schedules.shard.segments import Problem, Solution, megatron, solution_of, solve
from lancet_kernels.schedules.time.simulate import Timeline
from lancet_kernels.schedules.time.simulate import simulate as simulated_order
from lancet_kernels.schedules.time.timeline import save_picture

EDGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10), (5, 10))
MLP = ("fc1", "activation", "fc2")


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block. gated: the activation multiplies two halves (SwiGLU). key_value_width: the width of
    the keys, and of the values, if it differs from `width` (grouped-query attention)."""

    width: int
    hidden: int
    gated: bool = False
    key_value_width: int = 0


def block(sizes: BlockSizes, batch: int, sequence: int) -> tuple[Operator, ...]:
    """The operators of a block, for a batch of sequences."""
    b, m, d, f = batch, sequence, sizes.width, sizes.hidden
    qkv = d + 2 * (sizes.key_value_width or d)
    # Causal: half of query x key and of probabilities x value.
    attention = 2.0 * b * m * m * d
    return (
        pointwise("add 0", b, m, d, passes=3),
        pointwise("norm 1", b, m, d, passes=2),
        linear("qkv", b, m, d, qkv),
        pointwise("attention", b, m, d, splits="bh", passes=4, flops=attention),
        linear("projection", b, m, d, d),
        pointwise("add 1", b, m, d, passes=3),
        pointwise("norm 2", b, m, d, passes=2),
        linear("fc1", b, m, d, f * (2 if sizes.gated else 1)),
        pointwise("activation", b, m, f, passes=3 if sizes.gated else 2),
        linear("fc2", b, m, f, d),
        pointwise("add 2", b, m, d, passes=3),
    )


def problem(cluster: Cluster, sizes: BlockSizes, batch: int, sequence: int, devices: int) -> Problem:
    """All partitions of a block over `devices`."""
    return Problem.over(cluster, block(sizes, batch, sequence), EDGES, devices)


def spatial(problem: Problem) -> Problem:
    """Spatial splits only, as in other searches."""
    choices = zip(problem.operators, problem.choices, strict=True)
    return problem.restricted({o.name: [p for p in partitions if p.steps == 1] for o, partitions in choices})


def fixed(problem: Problem, partitions: Sequence[Partition], layers: int = 1) -> Solution:
    """The cost of `layers` layers with a fixed partition of each operator."""
    only = problem.restricted({o.name: (p,) for o, p in zip(problem.operators, partitions, strict=True)})
    return solution_of(only, [0] * (1 + layers * (len(partitions) - 1)))


def best_megatron(
    problem: Problem, devices: int, layers: int = 1, memory_limit: float | None = None
) -> Solution:
    """Megatron's fastest split of the devices into data and tensor parallelism that fits into memory; if none
    does, the one that needs least."""
    bits, batch = devices.bit_length() - 1, problem.operators[0].sizes["b"]
    every = [
        fixed(problem, megatron(problem.operators, data, bits - data), layers)
        for data in range(bits + 1)
        if 1 << data <= batch
    ]
    fitting = [s for s in every if memory_limit is None or s.memory_bytes <= memory_limit]
    return min(fitting, key=lambda s: s.ms) if fitting else min(every, key=lambda s: s.memory_bytes)


SEQUENCE = 2048
BATCH = 8
GPUS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Model:
    """A model of the paper: its blocks, and how many."""

    name: str
    sizes: BlockSizes
    layers: int


MODELS = (
    Model("OPT 6.7B", BlockSizes(4096, 16384), 32),
    Model("OPT 175B", BlockSizes(12288, 49152), 96),
    Model("Llama2 7B", BlockSizes(4096, 11008, gated=True), 32),
    Model("Llama2 70B", BlockSizes(8192, 28672, gated=True, key_value_width=1024), 80),
    Model("Bloom 7B1", BlockSizes(4096, 16384), 30),
    Model("Bloom 176B", BlockSizes(14336, 57344), 70),
)


def row(model: Model, gpus: int) -> dict[str, Any]:
    """Search, and price Megatron's partition in the same space. -> times of all layers, memory, MLP blocks of
    Megatron's and PrimePar's alone, as JSON values."""
    whole = problem(load_cluster("p3dn"), model.sizes, BATCH, SEQUENCE, gpus)
    rule = fixed(whole, _rule(whole, gpus), model.layers)
    limit = rule.memory_bytes
    primepar = solve(whole, model.layers, limit)
    ms = {
        "megatron": rule.ms,
        "best megatron": best_megatron(whole, gpus, model.layers, limit).ms,
        "spatial": solve(spatial(whole), model.layers, limit).ms,
        "primepar": primepar.ms,
    }
    chosen = _middle_layer(primepar, len(whole.operators) - 1)
    return {
        "model": model.name,
        "gpus": gpus,
        "batch": BATCH,
        "iteration_ms": ms,
        "memory_gb": {"megatron": limit / 1e9, "primepar": primepar.memory_bytes / 1e9},
        "speedup": ms["megatron"] / ms["primepar"],
        "speedup_over_best_megatron": ms["best megatron"] / ms["primepar"],
        "speedup_over_spatial": ms["spatial"] / ms["primepar"],
        "speedup_without_communication": ms["megatron"] / rule.intra.compute_ms,
        "memory": primepar.memory_bytes / limit,
        "mlp": {"megatron": _mlp(whole, rule), "primepar": _mlp(whole, primepar)},
        "partition": {o.name: str(p) for o, p in zip(whole.operators, chosen, strict=True)},
    }


def _rule(p: Problem, gpus: int) -> list[Partition]:
    """Megatron's: tensor parallel in a node, data parallel between nodes."""
    bits, node = gpus.bit_length() - 1, p.cluster.gpus_per_node.bit_length() - 1
    return megatron(p.operators, max(0, bits - node), min(bits, node))


def _mlp(p: Problem, solution: Solution) -> dict[str, float]:
    """Times of the MLP block of a layer in the middle, with the redistribution between its operators and
    their neighbours."""
    chosen = _middle_layer(solution, len(p.operators) - 1)
    layer = p.restricted({o.name: (c,) for o, c in zip(p.operators, chosen, strict=True)})
    inside = [n for n, o in enumerate(p.operators) if o.name in MLP]
    intra = sum((layer.costs[n][0] for n in inside), PartitionCost())
    return {
        "computation_ms": intra.compute_ms,
        "collective_ms": intra.collective_ms,
        "redistribution_ms": sum(
            float(ms[0, 0]) for (i, j), ms in layer.edge_ms.items() if i in inside or j in inside
        ),
        "ring_ms": intra.ring_ms,
        "exposed_ring_ms": intra.exposed_ring_ms,
    }


def _middle_layer(solution: Solution, operators: int) -> tuple[Partition, ...]:
    """The partitions of one layer, with the last operator of the one before."""
    first = (len(solution.partitions) - 1) // operators // 2 * operators
    return solution.partitions[first : first + operators + 1]


class _Writer:
    """Writes instructions one after another; the next one reads the tensors in `needed`."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.needed: list[str] = ["input"]

    def add(self, name: str, kind: Kind, phase: Phase, ms: float) -> str:
        """-> the name of its output."""
        self.instructions.append(
            Instruction(name, name, tuple(self.needed), (name,), kind, phase, milliseconds=ms)
        )
        return name

    def step(self, name: str, phase: Phase, ms: float, travelling: Sequence[tuple[str, float]]) -> None:
        tiles = [self.add(f"{name}, {t}", Kind.POINT_TO_POINT, phase, shift) for t, shift in travelling]
        self.needed = [self.add(name, Kind.COMPUTE, phase, ms), *tiles]

    def waited(self, name: str, kind: Kind, phase: Phase, ms: float) -> None:
        if ms:
            self.needed = [self.add(name, kind, phase, ms)]

    def program(self, name: str) -> Program:
        tensors = {t: TensorSpec(t, (1,)) for i in self.instructions for t in i.outputs}
        tensors["input"] = TensorSpec("input", (1,))
        return Program(name, tuple(self.instructions), tensors, ("input",), tuple(self.needed))


def partition_program(problem: Problem, partitions: Sequence[Partition], name: str = "partition") -> Program:
    """One device's forward and backward of a layer under these partitions, with the cost model's times.

    Each step of a phase is an instruction, each tile that is sent beside it a message, started before it and
    awaited after it; all-reduces and redistributions are awaited at once.
    """
    writer, cluster = _Writer(), problem.cluster
    placed = list(zip(problem.operators, partitions, strict=True))

    def phase_of(n: int, which: str) -> None:
        operator, partition = placed[n]
        if which not in operator.products:
            return
        phase = Phase.FORWARD if which == FORWARD else Phase.BACKWARD
        times = phase_times(cluster, operator, partition, operator.products[which])
        for t, travelling in enumerate(times.travelling):
            place = f" {t}" if len(times.travelling) > 1 else ""
            writer.step(f"{operator.name} {which}{place}", phase, times.step_ms, travelling)
        writer.waited(f"sum of {operator.name} {which}", Kind.ALL_REDUCE, phase, times.collective_ms)

    def edges(phase: Phase, n: int) -> None:
        """The redistributions into operator n."""
        back = phase is Phase.BACKWARD
        for ends in problem.edges:
            if ends[not back] == n:
                (one, before), (other, after) = (placed[end] for end in ends)
                ms = redistributions(cluster, one, [before], other, [after])[int(back)].item()
                source, target = (other, one) if back else (one, other)
                name = f"{source.name} to {target.name}"
                writer.waited(name, Kind.OTHER_COMMUNICATION, phase, ms)

    for n in range(len(placed)):
        edges(Phase.FORWARD, n)
        phase_of(n, FORWARD)
    for n in reversed(range(len(placed))):
        edges(Phase.BACKWARD, n)
        phase_of(n, BACKWARD)
        phase_of(n, GRADIENT)
    return writer.program(name)


def slides_timelines() -> dict[str, Timeline]:
    """The MLP block of the slides' timelines, 2 nodes of 4 GPUs: Megatron's partition and PrimePar's.

    The slides have size(O) / 4 + size(I) / 4 < size(W) / 2, so a batch of less than 4 x width tokens.
    """
    cluster = replace(load_cluster("p3dn"), gpus_per_node=4)
    operators = block(MODELS[0].sizes, BATCH // 2, SEQUENCE)[7:10]
    p = Problem.over(cluster, operators, ((0, 1), (1, 2)), 8)
    b, n, k, m = (split(d) for d in "bnkm")
    chosen = {
        "Megatron: fc1 {B, K, K}, fc2 {B, N, N}": ((b, k, k), (b, k, k), (b, n, n)),
        "PrimePar: fc1 {K, P2x2}, fc2 {N, P2x2}": ((k, square(1)), (k, m, k), (n, square(1))),
    }
    return {
        name: simulated_order(
            partition_program(p, list(map(Partition, partitions)), name), lambda i, _: i.milliseconds or 0.0
        )
        for name, partitions in chosen.items()
    }


TITLE = "PrimePar (ASPLOS '24, slides)"
FIGURES = ()
"""None can be chosen."""
ASSUMPTIONS = (
    "clusters of 8 x V100 32 GB a node (p3dn.toml: NVLink 130 GB/s, one 100 Gbps network card a node, 80 % "
    "of both reached; GEMMs at 45 % of float16's peak); the slides name neither links nor efficiency",
    f"a batch of {BATCH} sequences of {SEQUENCE} tokens for every number of GPUs, one forward and "
    "backward, float16 with Adam (16 bytes a parameter); the slides name none of it",
    "every block at its real size, as many as the model has; only linear layers, attention, activations, "
    "norms and additions, no embedding, no head",
    "Megatron: tensor parallel over the GPUs of a node, data parallel between nodes; `best Megatron` is the "
    "fastest of all splits into data and tensor parallel GPUs that needs no more memory than that",
    "PrimePar's partitions may need as much memory as Megatron's, no more; several bits may cut one "
    "dimension; what stands between linear layers may also be replicated",
    "attention is one operator, cut along batch and heads; what redistributes for it is counted",
    "all-reduces, also those of weight gradients, and redistributions are exposed; ring steps are hidden by "
    "the GEMM of their step if it is long enough; an all-reduce is never a reduce-scatter and an all-gather",
    "memory is weights with gradients and optimizer states, and inputs that the backward needs, without the "
    "buffers in which tiles of a step arrive; of a square one tile of the weight, as in the slides, which "
    "goes on from phase to phase, and back to where it began beside the last step of the gradient; 70B and "
    "more do not fit on 32 V100s at all, so no GPU's limit is set",
)


def simulate(
    _figures: Sequence[str], run: Run, models: Sequence[Model] = MODELS, gpus: Sequence[int] = GPUS
) -> dict[str, Any]:
    """Everything; there are no figures to choose from."""
    return {"rows": run([(row, (model, n)) for n in gpus for model in models])}


def quantities(data: Data) -> dict[str, Any]:
    """The quantities of the slides' claims; growth only where few and many GPUs were simulated."""
    rows = data["rows"]
    blocks = [(row["mlp"]["primepar"], row["mlp"]["megatron"]) for row in rows]

    def waited_ms(times: Data) -> float:
        return times["collective_ms"] + times["redistribution_ms"]

    left = [waited_ms(new) / waited_ms(old) for new, old in blocks]
    worst = rows[left.index(max(left))]
    rings = [new["exposed_ring_ms"] / new["ring_ms"] for new, _ in blocks if new["ring_ms"]]
    named = {
        "speedup": Span.of(row["speedup"] for row in rows),
        "over_best": Span.of(row["speedup_over_best_megatron"] for row in rows),
        "low": min(rows, key=lambda row: row["speedup"]),
        "high": max(rows, key=lambda row: row["speedup"]),
        "memory": Span.of(row["memory"] for row in rows),
        "needy": max(rows, key=lambda row: row["memory"]),
        "collectives": Span.of(left),
        "all_reduces": Span.of(new["collective_ms"] / old["collective_ms"] for new, old in blocks),
        "worst": worst,
        "worst_megatron_ms": waited_ms(worst["mlp"]["megatron"]),
        "computation": Span.of(new["computation_ms"] / old["computation_ms"] for new, old in blocks),
        "rings": Span.of(rings or [1.0]),
    }
    few, many = ([row["speedup"] for row in rows if row["gpus"] == n] for n in (min(GPUS), max(GPUS)))
    return named | ({"on_few": fmean(few), "on_many": fmean(many)} if few and many else {})


def exhibits(data: Data) -> Iterator[Exhibit]:
    """Throughput and memory, MLP blocks."""
    where = ("model", "gpus")
    gains = ("speedup", "speedup_over_best_megatron", "speedup_over_spatial", "memory")

    def chosen(row: Data, *keys: str) -> dict[str, Any]:
        return {key: row[key] for key in keys}

    rows = [
        chosen(r, *where, "iteration_ms", *gains) | chosen(r["partition"], "qkv", "fc1", "fc2")
        for r in data["rows"]
    ]
    title = "Throughput, and peak memory of a GPU relative to Megatron's; one forward and backward"
    yield Exhibit("throughput", title, rows, Chart("bars", ("gpus",), gains, ("model",)))
    blocks = [
        {**chosen(r, *where), "partition": name, **ms} for r in data["rows"] for name, ms in r["mlp"].items()
    ]
    parts = ("computation_ms", "collective_ms", "redistribution_ms", "exposed_ring_ms")
    title = "MLP blocks of one layer, Megatron's partition and PrimePar's"
    yield Exhibit("mlp", title, blocks, Chart("stack", ("gpus", "partition"), parts, ("model",)))


def timelines(path: Path) -> None:
    """The slides' MLP block under Megatron's partition, and under PrimePar's."""
    events = {name: timeline.events for name, timeline in slides_timelines().items()}
    save_picture(
        events,
        path,
        weight_gradients=[e.name for e in chain(*events.values()) if " gradient" in e.name],
        title="MLP block of OPT 6.7B on 2 nodes of 4 V100s, forward and backward (simulated)",
    )
