"""PrimePar's evaluation (ASPLOS '24, slides) by simulation: blocks at their real sizes, the best partitions
of its whole space beside Megatron's. Data only; text and pictures are drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lancet_kernels.graph.clusters import Cluster, load_cluster
from lancet_kernels.graph.slices import Partition, split, square
from lancet_kernels.schedules.partition_costs import Cost
from lancet_kernels.schedules.partition_program import partition_program
from lancet_kernels.schedules.segments import Problem, Solution, solve
from lancet_kernels.schedules.simulate import Timeline, simulate
from lancet_kernels.schedules.transformer_blocks import (
    MLP,
    BlockSizes,
    best_megatron,
    block,
    fixed,
    megatron,
    problem,
)

SEQUENCE = 2048
BATCH = 8
GPUS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Model:
    """A model of the paper: its blocks, and how many."""

    name: str
    sizes: BlockSizes
    layers: int
    is_large: bool


MODELS = (
    Model("OPT 6.7B", BlockSizes(4096, 32, 16384), 32, False),
    Model("OPT 175B", BlockSizes(12288, 96, 49152), 96, True),
    Model("Llama2 7B", BlockSizes(4096, 32, 11008, gated=True), 32, False),
    Model("Llama2 70B", BlockSizes(8192, 64, 28672, gated=True, key_value_width=1024), 80, True),
    Model("Bloom 7B1", BlockSizes(4096, 32, 16384), 30, False),
    Model("Bloom 176B", BlockSizes(14336, 112, 57344), 70, True),
)
PAPER_SPEEDUP, PAPER_MEMORY, PAPER_COLLECTIVES = (1.11, 1.68), (0.68, 0.93), (0.199, 0.622)
PAPER_3D = {"OPT 175B": 1.46, "Llama2 70B": 1.27, "Bloom 176B": 1.40}
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
    "3D parallelism: 1 to 8 pipeline stages of equal layers, 16 microbatches of 8 sequences, 1F1B without "
    "the cost of sending activations; weight gradients are summed once in an iteration; nothing may need "
    "more memory than Megatron's split that needs least (these models do not fit on 32 V100s even so)",
)


@dataclass(frozen=True)
class Setting:
    """One model on so many GPUs, and what a sensitivity changes."""

    model: Model
    gpus: int
    batch: int = BATCH
    gpus_per_node: int = 8
    network: float = 1.0
    """Bandwidth between nodes, relative to the cluster's."""
    compute: float = 1.0
    """Efficiency of GEMMs, relative to the cluster's."""
    microbatches: int = 1
    """Of `batch` sequences each, at whose end weight gradients are summed."""

    @property
    def cluster(self) -> Cluster:
        cluster = load_cluster("p3dn")
        efficiency = {k: min(1.0, v * self.compute) for k, v in cluster.compute_efficiency.items()}
        return replace(
            cluster,
            gpus_per_node=self.gpus_per_node,
            inter_node_gb_per_s=cluster.inter_node_gb_per_s * self.network,
            compute_efficiency=efficiency,
        )


@dataclass(frozen=True)
class Result:
    """Solutions of one setting, over all layers; MLP blocks of Megatron's and PrimePar's alone."""

    setting: Setting
    megatron: Solution
    best_megatron: Solution
    spatial: Solution
    primepar: Solution
    mlp: Mapping[str, tuple[Cost, float]]

    @property
    def speedup(self) -> float:
        return self.megatron.ms / self.primepar.ms

    @property
    def memory(self) -> float:
        return self.primepar.memory_bytes / self.megatron.memory_bytes


def simulate_setting(setting: Setting) -> Result:
    """Search, and price Megatron's partition in the same space."""
    model, gpus = setting.model, setting.gpus
    whole = _problem(setting)
    # Splits alone, what others search.
    spatial = whole.restricted(
        {
            o.name: [p for p in partitions if p.steps == 1]
            for o, partitions in zip(whole.operators, whole.choices, strict=True)
        }
    )
    rule = fixed(whole, _rule(whole, gpus), model.layers)
    limit = rule.memory_bytes
    primepar = solve(whole, model.layers, limit)
    return Result(
        setting,
        rule,
        best_megatron(whole, gpus, model.layers, limit),
        solve(spatial, model.layers, limit),
        primepar,
        {"megatron": _mlp(whole, rule), "primepar": _mlp(whole, primepar)},
    )


def _problem(setting: Setting) -> Problem:
    sizes, parts = setting.model.sizes, setting.microbatches
    return problem(setting.cluster, sizes, setting.batch, SEQUENCE, setting.gpus, microbatches=parts)


def _rule(p: Problem, gpus: int) -> list[Partition]:
    """Megatron's: tensor parallel in a node, data parallel between nodes."""
    bits, node = gpus.bit_length() - 1, p.cluster.gpus_per_node.bit_length() - 1
    return megatron(p.operators, max(0, bits - node), min(bits, node))


def _mlp(p: Problem, solution: Solution) -> tuple[Cost, float]:
    """Of the MLP block of a layer in the middle: its operators, and milliseconds of the redistribution
    between them and their neighbours."""
    chosen = _middle_layer(solution, len(p.operators) - 1)
    layer = p.restricted({o.name: (c,) for o, c in zip(p.operators, chosen, strict=True)})
    inside = [n for n, o in enumerate(p.operators) if o.name in MLP]
    intra = sum((layer.costs[n][0] for n in inside), Cost())
    inter = sum(float(ms[0, 0]) for (i, j), ms in layer.edge_ms.items() if i in inside or j in inside)
    return intra, inter


def _middle_layer(solution: Solution, operators: int) -> tuple[Partition, ...]:
    """The partitions of one layer, with the last operator of the one before."""
    first = (len(solution.partitions) - 1) // operators // 2 * operators
    return solution.partitions[first : first + operators + 1]


def timelines() -> dict[str, Timeline]:
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
        name: simulate(partition_program(p, list(map(Partition, partitions)), name), _given)
        for name, partitions in chosen.items()
    }


def _given(instruction, _tensors) -> float:
    return instruction.milliseconds


@cache
def _stage_ms(model: Model, gpus: int, stages: int, microbatches: int) -> dict[str, float]:
    """Milliseconds of one microbatch on one stage of so many GPUs, by whose partition it runs under."""
    setting = Setting(replace(model, layers=model.layers // stages), gpus, microbatches=microbatches)
    p, layers = _problem(setting), setting.model.layers
    # If none fits into nothing, the one that needs least.
    megatron = best_megatron(p, gpus, layers, memory_limit=0.0)
    return {
        "megatron": megatron.ms,
        "primepar": solve(p, layers, megatron.memory_bytes).ms,
        "computation": megatron.intra.compute_ms,
    }


def pipelines(model: Model, gpus: int = 32, microbatches: int = 16) -> dict[str, dict[int, float]]:
    """Milliseconds of an iteration, by stages of the pipeline: (microbatches + stages - 1) stage times;
    "computation" is what Megatron's would take if communication took no time."""
    iteration: dict[str, dict[int, float]] = {"megatron": {}, "primepar": {}, "computation": {}}
    for stages in (1, 2, 4, 8):
        for name, ms in _stage_ms(model, gpus // stages, stages, microbatches).items():
            iteration[name][stages] = (microbatches + stages - 1) * ms
    return iteration


def settings(models: Sequence[Model], gpus: Sequence[int]) -> list[Setting]:
    """The table's."""
    return [Setting(model, n) for n in gpus for model in models]


def sensitivities(model: Model, gpus: int) -> dict[str, Setting]:
    """What the result may depend on, one at a time."""
    base = Setting(model, gpus)
    return {
        "batch 4": replace(base, batch=4),
        "batch 16": replace(base, batch=16),
        "network half as fast": replace(base, network=0.5),
        "network four times as fast": replace(base, network=4.0),
        "GEMMs at 90 % of the peak": replace(base, compute=2.0),
        "4 GPUs a node, as in the timelines": replace(base, gpus_per_node=4),
    }


def reproduce(
    models: Sequence[Model] = MODELS,
    gpus: Sequence[int] = GPUS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Everything but the pictures."""
    every, large = settings(models, gpus), [m for m in models if m.is_large]
    changed = {
        (m.name, what): s
        for m in models
        if m.name in ("OPT 6.7B", "OPT 175B")
        for what, s in sensitivities(m, min(16, max(gpus))).items()
    }
    total = len(every) + len(changed) + len(large)
    results = []
    for setting in every:
        results.append(simulate_setting(setting))
        progress(len(results), total)
    rows = [_row(r) for r in results]
    sensitive = []
    for (_, what), setting in changed.items():
        sensitive.append({"change": what, **_row(simulate_setting(setting))})
        progress(len(rows) + len(sensitive), total)
    three = {}
    for model in large:
        three[model.name] = pipelines(model, max(gpus))
        progress(len(rows) + len(sensitive) + len(three), total)
    return {"rows": rows, "sensitivity": sensitive, "pipelines": three, "claims": claims(rows, three)}


def _row(r: Result) -> dict[str, Any]:
    mlp = {
        name: {
            "computation_ms": intra.compute_ms,
            "collective_ms": intra.collective_ms,
            "redistribution_ms": inter,
            "ring_ms": intra.ring_ms,
            "exposed_ring_ms": intra.exposed_ring_ms,
        }
        for name, (intra, inter) in r.mlp.items()
    }
    names = [o.name for o in block(r.setting.model.sizes, r.setting.batch, SEQUENCE)]
    chosen = _middle_layer(r.primepar, len(names) - 1)
    return {
        "model": r.setting.model.name,
        "gpus": r.setting.gpus,
        "batch": r.setting.batch,
        "iteration_ms": {
            "megatron": r.megatron.ms,
            "best megatron": r.best_megatron.ms,
            "spatial": r.spatial.ms,
            "primepar": r.primepar.ms,
        },
        "memory_gb": {"megatron": r.megatron.memory_bytes / 1e9, "primepar": r.primepar.memory_bytes / 1e9},
        "speedup": r.speedup,
        "speedup_over_best_megatron": r.best_megatron.ms / r.primepar.ms,
        "speedup_over_spatial": r.spatial.ms / r.primepar.ms,
        "speedup_without_communication": r.megatron.ms / r.megatron.intra.compute_ms,
        "memory": r.memory,
        "mlp": mlp,
        "partition": {name: str(p) for name, p in zip(names, chosen, strict=True)},
    }


def claims(rows: Sequence[Mapping[str, Any]], three: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the slides claim, beside what comes out here, whether it holds, and if not, why."""

    def span(values: Sequence[float], form: str = "{:.2f}") -> str:
        return f"{form.format(min(values))} to {form.format(max(values))}"

    speedups = [r["speedup"] for r in rows]
    over_best = [r["speedup_over_best_megatron"] for r in rows]
    memory = [r["memory"] for r in rows]
    parts = [(r["mlp"]["primepar"], r["mlp"]["megatron"]) for r in rows]
    collectives = [
        (new["collective_ms"] + new["redistribution_ms"]) / (old["collective_ms"] + old["redistribution_ms"])
        for new, old in parts
    ]
    all_reduces = [new["collective_ms"] / old["collective_ms"] for new, old in parts]
    computation = [new["computation_ms"] / old["computation_ms"] for new, old in parts]
    rings = [new["exposed_ring_ms"] / new["ring_ms"] for new, _ in parts if new["ring_ms"]]
    least, most = PAPER_SPEEDUP
    entries = [
        {
            "name": "training throughput over Megatron's, by setting",
            "paper": f"{least} to {most}",
            "ours": f"{span(speedups)}; over its best split {span(over_best)}",
            "holds": min(speedups) >= least and max(speedups) >= most,
            "why": _why_throughput(rows),
        },
        {
            "name": "peak memory relative to Megatron's",
            "paper": span(PAPER_MEMORY),
            "ours": span(memory),
            "holds": max(memory) <= PAPER_MEMORY[1],
            "why": _why_memory(rows),
        },
        {
            "name": "MLP block: latency of collectives relative to the baseline's",
            "paper": span(PAPER_COLLECTIVES, "{:.1%}"),
            "ours": f"{span(collectives, '{:.1%}')}; without redistribution {span(all_reduces, '{:.1%}')}",
            "holds": max(collectives) <= PAPER_COLLECTIVES[1],
            "why": _why_collectives(rows),
        },
        {
            "name": "MLP block: computation relative to the baseline's",
            "paper": "the same",
            "ours": span(computation),
            "holds": all(abs(c - 1) < 0.03 for c in computation),
            "why": "Tiles of other shapes take another time.",
        },
        {
            "name": "MLP block: share of ring communication that is not hidden",
            "paper": "0 %",
            "ours": span(rings, "{:.1%}") if rings else "no ring",
            "holds": bool(rings) and max(rings) < 0.01,
            "why": "The GEMM of a step is shorter than what travels beside it."
            if rings
            else "No partition found has a square.",
        },
    ]
    ends = [[r["speedup"] for r in rows if r["gpus"] == n] for n in (min(GPUS), max(GPUS))]
    if all(ends):
        few, many = (sum(e) / len(e) for e in ends)
        entries.append(
            {
                "name": "benefits grow with the number of GPUs (mean speedup)",
                "paper": "yes",
                "ours": f"{few:.2f} on {min(GPUS)}, {many:.2f} on {max(GPUS)}",
                "holds": many > few,
                "why": "Communication takes no larger share on more GPUs.",
            }
        )
    entries += [_pipeline_claim(name, iteration) for name, iteration in three.items()]
    return [{k: v for k, v in e.items() if k != "why" or not e["holds"]} for e in entries]


def _why_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the setting that needs most."""
    most = max(rows, key=lambda r: r["memory"])
    linears = ", ".join(f"{name} {most['partition'][name]}" for name in ("qkv", "projection", "fc1", "fc2"))
    return (
        f"{most['model']} on {most['gpus']} GPUs: the search minimizes time, may use as much memory as "
        f"Megatron's partition, and takes {linears}."
    )


def _why_collectives(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the setting in which the largest share is left."""

    def ms(row: Mapping[str, Any], who: str) -> float:
        return row["mlp"][who]["collective_ms"] + row["mlp"][who]["redistribution_ms"]

    most = max(rows, key=lambda r: ms(r, "primepar") / ms(r, "megatron"))
    block, old = most["mlp"]["primepar"], most["mlp"]["megatron"]
    return (
        f"{most['model']} on {most['gpus']} GPUs, fc1 {most['partition']['fc1']}, fc2 "
        f"{most['partition']['fc2']}: {block['collective_ms']:.1f} ms of all-reduces and "
        f"{block['redistribution_ms']:.1f} ms of redistribution, which counts as a collective here, are left "
        f"of {ms(most, 'megatron'):.1f} ms of Megatron's, beside {old['computation_ms']:.1f} ms of "
        "computation; "
        "what the search minimizes is the time of whole layers."
    )


def _why_throughput(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the smallest and the largest speedup."""
    low, high = (choose(rows, key=lambda r: r["speedup"]) for choose in (min, max))
    return (
        f"{low['model']} on {low['gpus']} GPUs: hiding all communication would make Megatron's partition "
        f"{low['speedup_without_communication']:.2f} times as fast with these links and GEMMs, so there is "
        f"little to gain. {high['model']} on {high['gpus']} GPUs: data parallel between nodes sums all "
        f"weight gradients after {high['batch']} sequences; of Megatron's splits another one is better, over "
        f"which {high['speedup_over_best_megatron']:.2f} are left."
    )


def _pipeline_claim(name: str, iteration: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    stages = {who: min(ms, key=lambda n: ms[n]) for who, ms in iteration.items()}
    megatron, ours = (iteration[who][stages[who]] for who in ("megatron", "primepar"))
    most = megatron / iteration["computation"][stages["megatron"]]
    return {
        "name": f"3D parallelism, {name}: speedup",
        "paper": f"{PAPER_3D[name]:.2f}",
        "ours": f"{megatron / ours:.2f}",
        "holds": megatron / ours >= PAPER_3D[name],
        "why": f"With {stages['megatron']} stages, its best, Megatron's would be {most:.2f} times as fast "
        "without any communication, because a stage fits into a node with fast links. The slides must have "
        "had stages over several nodes, or slower links; they name neither.",
    }
