"""PrimePar's evaluation (ASPLOS '24, slides) by simulation: throughput, memory, MLP blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.drawing import Chart
from bench.papers.primepar_settings import (
    BATCH,
    GPUS,
    MODELS,
    SEQUENCE,
    Model,
    row,
    slides_timelines,
)
from bench.papers.report import Data, Exhibit, Run, Span
from lancet_kernels.schedules.time.timeline import save_picture

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
    """What the slides' claims are about; growth only where few and many GPUs were simulated."""
    rows = data["rows"]
    blocks = [(row["mlp"]["primepar"], row["mlp"]["megatron"]) for row in rows]

    def waited_ms(of: Data) -> float:
        return of["collective_ms"] + of["redistribution_ms"]

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
