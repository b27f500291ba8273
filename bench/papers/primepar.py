"""PrimePar's evaluation (ASPLOS '24, slides) by simulation: throughput, memory, MLP blocks, pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from bench.drawing import Chart
from bench.papers.primepar_settings import (
    BATCH,
    GPUS,
    MODELS,
    SEQUENCE,
    Model,
    Scenario,
    pipelines,
    row,
    slides_timelines,
)
from bench.papers.report import Claim, Data, Exhibit, Run, claim, span
from lancet_kernels.schedules.time.timeline import save_picture

TITLE = "PrimePar (ASPLOS '24, slides)"
FIGURES = ()
"""None can be chosen."""
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

PIPELINES = {
    "megatron": "best Megatron",
    "primepar": "primepar",
    "computation": "best Megatron's computation",
}


def simulate(
    _figures: Sequence[str], run: Run, models: Sequence[Model] = MODELS, gpus: Sequence[int] = GPUS
) -> dict[str, Any]:
    """Everything; there are no figures to choose from."""
    every = [Scenario(model, n) for n in gpus for model in models]
    changed = [
        (what, setting)
        for m in models
        if m.name in ("OPT 6.7B", "OPT 175B")
        for what, setting in sensitivities(m, min(16, max(gpus))).items()
    ]
    large = [m for m in models if m.name in PAPER_3D]
    rows = [(row, (setting,)) for setting in (*every, *(setting for _, setting in changed))]
    results = iter(run([*rows, *((pipelines, (model, max(gpus))) for model in large)]))
    return {
        "rows": [next(results) for _ in every],
        "sensitivity": [{"change": what, **next(results)} for what, _ in changed],
        "pipelines": {model.name: next(results) for model in large},
    }


def sensitivities(model: Model, gpus: int) -> dict[str, Scenario]:
    """What the result may depend on, one at a time."""
    base = Scenario(model, gpus)
    return {
        "batch 4": replace(base, batch=4),
        "batch 16": replace(base, batch=16),
        "network half as fast": replace(base, network=0.5),
        "network four times as fast": replace(base, network=4.0),
        "GEMMs at 90 % of the peak": replace(base, compute=2.0),
        "4 GPUs a node, as in the timelines": replace(base, gpus_per_node=4),
    }


def claims(data: Data) -> list[Claim]:
    """What the slides claim, beside what comes out here, whether it holds, and if not, why."""
    return [
        *_throughput_claims(data["rows"]),
        *_mlp_claims(data["rows"]),
        *_growth_claims(data["rows"]),
        *(_pipeline_claim(name, iteration) for name, iteration in data["pipelines"].items()),
    ]


def _throughput_claims(rows: Sequence[Data]) -> Iterator[Claim]:
    speedups = [r["speedup"] for r in rows]
    over_best = span(r["speedup_over_best_megatron"] for r in rows)
    low, high = (choose(rows, key=lambda r: r["speedup"]) for choose in (min, max))
    least, most = PAPER_SPEEDUP
    yield claim(
        "training throughput over Megatron's, by setting",
        f"{least} to {most}",
        f"{span(speedups)}; over its best split {over_best}",
        min(speedups) >= least and max(speedups) >= most,
        f"{low['model']} on {low['gpus']} GPUs: hiding all communication would make Megatron's partition "
        f"{low['speedup_without_communication']:.2f} times as fast with these links and GEMMs, so there is "
        f"little to gain. {high['model']} on {high['gpus']} GPUs: data parallel between nodes sums all "
        f"weight gradients after {high['batch']} sequences; of Megatron's splits another one is better, over "
        f"which {high['speedup_over_best_megatron']:.2f} are left.",
    )
    memory = [r["memory"] for r in rows]
    needy = max(rows, key=lambda r: r["memory"])
    linears = ", ".join(f"{name} {needy['partition'][name]}" for name in ("qkv", "projection", "fc1", "fc2"))
    yield claim(
        "peak memory relative to Megatron's",
        span(PAPER_MEMORY),
        span(memory),
        max(memory) <= PAPER_MEMORY[1],
        f"{needy['model']} on {needy['gpus']} GPUs: the search minimizes time, may use as much memory as "
        f"Megatron's partition, and takes {linears}.",
    )


def _mlp_claims(rows: Sequence[Data]) -> Iterator[Claim]:
    def collectives(of: Data) -> float:
        return of["collective_ms"] + of["redistribution_ms"]

    parts = [(r["mlp"]["primepar"], r["mlp"]["megatron"]) for r in rows]
    left = [collectives(new) / collectives(old) for new, old in parts]
    most = rows[left.index(max(left))]
    new, old = parts[left.index(max(left))]
    all_reduces = span((new["collective_ms"] / old["collective_ms"] for new, old in parts), "{:.1%}")
    yield claim(
        "MLP block: latency of collectives relative to the baseline's",
        span(PAPER_COLLECTIVES, "{:.1%}"),
        f"{span(left, '{:.1%}')}; without redistribution {all_reduces}",
        max(left) <= PAPER_COLLECTIVES[1],
        f"{most['model']} on {most['gpus']} GPUs, fc1 {most['partition']['fc1']}, fc2 "
        f"{most['partition']['fc2']}: {new['collective_ms']:.1f} ms of all-reduces and "
        f"{new['redistribution_ms']:.1f} ms of redistribution, which counts as a collective here, are left "
        f"of {collectives(old):.1f} ms of Megatron's, beside {old['computation_ms']:.1f} ms of computation; "
        "what the search minimizes is the time of whole layers.",
    )
    computation = [new["computation_ms"] / old["computation_ms"] for new, old in parts]
    yield claim(
        "MLP block: computation relative to the baseline's",
        "the same",
        span(computation),
        all(abs(c - 1) < 0.03 for c in computation),
        "Tiles of other shapes take another time.",
    )
    rings = [new["exposed_ring_ms"] / new["ring_ms"] for new, _ in parts if new["ring_ms"]]
    why = "The GEMM of a step is shorter than what travels beside it."
    yield claim(
        "MLP block: share of ring communication that is not hidden",
        "0 %",
        span(rings, "{:.1%}") if rings else "no ring",
        bool(rings) and max(rings) < 0.01,
        why if rings else "No partition found has a square.",
    )


def _growth_claims(rows: Sequence[Data]) -> Iterator[Claim]:
    few, many = ([r["speedup"] for r in rows if r["gpus"] == n] for n in (min(GPUS), max(GPUS)))
    if few and many:
        on_few, on_many = (sum(of) / len(of) for of in (few, many))
        yield claim(
            "benefits grow with the number of GPUs (mean speedup)",
            "yes",
            f"{on_few:.2f} on {min(GPUS)}, {on_many:.2f} on {max(GPUS)}",
            on_many > on_few,
            "Communication takes no larger share on more GPUs.",
        )


def _pipeline_claim(name: str, iteration: Mapping[str, Mapping[int, float]]) -> Claim:
    stages = {who: min(ms, key=lambda n: ms[n]) for who, ms in iteration.items()}
    megatron, ours = (iteration[who][stages[who]] for who in ("megatron", "primepar"))
    most = megatron / iteration["computation"][stages["megatron"]]
    return claim(
        f"3D parallelism, {name}: speedup",
        f"{PAPER_3D[name]:.2f}",
        f"{megatron / ours:.2f}",
        megatron / ours >= PAPER_3D[name],
        f"With {stages['megatron']} stages, its best, Megatron's would be {most:.2f} times as fast "
        "without any communication, because a stage fits into a node with fast links. The slides must have "
        "had stages over several nodes, or slower links; they name neither.",
    )


def exhibits(data: Data) -> Iterator[Exhibit]:
    """Throughput and memory, MLP blocks, sensitivities, pipelines."""
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
    changed = [chosen(r, *where, "change", *gains) for r in data["sensitivity"]]
    yield Exhibit("sensitivity", "What the speedup depends on", changed)
    stages = [
        {"model": model, "tensors": PIPELINES[name], "stages": ms}
        for model, iteration in data["pipelines"].items()
        for name, ms in iteration.items()
    ]
    yield Exhibit("pipelines", "3D parallelism: iteration in ms by pipeline stages", stages)


def timelines(path: Path) -> None:
    """The slides' MLP block under Megatron's partition, and under PrimePar's."""
    events = {name: timeline.events for name, timeline in slides_timelines().items()}
    save_picture(
        events,
        path,
        weight_gradients=[e.name for e in chain(*events.values()) if " gradient" in e.name],
        title="MLP block of OPT 6.7B on 2 nodes of 4 V100s, forward and backward (simulated)",
    )
