"""Two models over 8 to 4,096 GPUs: `python -m bench.published.scale` writes docs/reference/scale.md, which
says what is compared, and its picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.published.rows import CONFIGS
from lancet_kernels.prediction.answer import Answer, answer
from lancet_kernels.prediction.question import Question, gib
from lancet_kernels.prediction.search import kept_gib, states_gib

DOCS = Path(__file__).parents[2] / "docs"
MODELS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "DeepSeek-V3": "deepseek-v3"}
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SEQUENCES = 4096


@dataclass(frozen=True)
class Point:
    """The fastest layout of a model on a number of GPUs, or None if none fits."""

    model: str
    gpus: int
    best: Answer | None

    def row(self) -> str:
        """A row of the page's table."""
        if self.best is None:
            return f"| {self.model} | {self.gpus:,} | does not fit | | | | | |"
        q, name = self.best.question, self.best.best
        figures, none = self.best.strategies[name], self.best.strategies["none"]
        share = {one: s.exposed_ms.get("all_to_all", 0.0) / s.step_ms for one, s in
                 (("none", none), (name, figures))}  # fmt: skip
        layout = f"EP{q.expert_ranks}, {'FSDP' if q.sharding == 'full' else 'optimizer sharded'}"
        layout += "" if q.recompute == "none" else ", full recompute"
        return (
            f"| {self.model} | {self.gpus:,} | {layout} | {name} | {figures.step_ms / 1e3:,.2f} | "
            f"{q.tokens / figures.step_ms * 1e3:,.0f} | {share['none']:.0%} | {share[name]:.0%} |"
        )


def study() -> Iterator[Point]:
    """All points, models one after the other."""
    for model, config in MODELS.items():
        for gpus in GPUS:
            yield Point(model, gpus, fastest(str(CONFIGS / f"{config}.json"), gpus))


def fastest(hf: str, gpus: int) -> Answer | None:
    """The answer of the fastest layout that fits."""
    answers: list[Answer] = []
    fitting: set[tuple[int, str]] = set()
    for question in _layouts(hf, gpus):
        limit = gib(question.hardware.memory_gb * 1e9)
        # Recomputation is slower than none.
        layout = question.expert_ranks, question.sharding
        if layout in fitting or states_gib(question) + kept_gib(question) > limit:
            continue
        result = answer(question)
        if result.fits(result.best):
            fitting.add(layout)
            answers.append(result)
    return min(answers, key=lambda one: one.strategies[one.best].step_ms, default=None)


def _layouts(hf: str, gpus: int) -> Iterator[Question]:
    """One sequence per GPU and microbatch."""
    for expert_ranks, sharding, recompute in product((8, 16, 64), ("optimizer", "full"), ("none", "full")):
        if expert_ranks <= gpus:
            yield Question(
                hf, "dgx-h100", gpus, expert_ranks, sharding, accumulate=max(1, SEQUENCES // gpus),
                recompute=recompute, dispatch="hybridep",
            )  # fmt: skip


def picture(points: Sequence[Point], path: Path) -> None:
    """Tokens per second and GPU, and the share of the step in which an all-to-all is exposed, over GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, share = figure.subplots(1, 2)
    for model, colour in zip(MODELS, ("#4c78a8", "#e45756"), strict=True):
        own = [(p.gpus, p.best) for p in points if p.model == model and p.best is not None]
        for strategy, style in (("none", "--"), ("best", "-")):
            shown = [(g, a, a.strategies[a.best if strategy == "best" else "none"]) for g, a in own]
            gpus = [g for g, _, _ in shown]
            tokens = [a.question.tokens / s.step_ms * 1e3 for _, a, s in shown]
            exposed = [100 * s.exposed_ms.get("all_to_all", 0.0) / s.step_ms for _, _, s in shown]
            speed.plot(gpus, tokens, style, color=colour, marker="o", label=f"{model}, {strategy}")
            share.plot(gpus, exposed, style, color=colour, marker="o")
    for axis, title in ((speed, "tokens/s per GPU"), (share, "all-to-all exposed, % of the step")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [str(g) for g in GPUS], rotation=45)
        axis.set_xlabel("H100 GPUs")
        axis.set_title(title, fontsize=11)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    speed.legend(fontsize=8)
    figure.savefig(path, dpi=110)


PAGE = """# Two models over 8 to 4,096 GPUs

`python -m bench.published.scale` wrote this page: **predictions** of steps of 4,096 sequences of 4,096 tokens
on DGX H100 nodes with HybridEP, for the fastest layout that fits among experts over 8, 16 and 64
ranks, sharded optimizer or FSDP, no or full recomputation. How good such predictions are:
[Predictions](predictions.md).

![Tokens per second and exposed all-to-all over the number of GPUs](../pictures/scale.png)

The last two columns are the share of the step in which an all-to-all is exposed, without overlap and with the
best strategy. With one microbatch per GPU (4,096 GPUs) there is no second one to run beside it.
Where `none` is best, the host launches kernels too slowly for overlap to gain anything.

| model | GPUs | layout | strategy | step, s | tokens/s per GPU | exposed, none | exposed, best |
|---|--:|---|---|--:|--:|--:|--:|
"""


def main() -> None:
    """Run the study and write the page and the picture."""
    points = []
    for point in study():
        points.append(point)
        print(point.row(), flush=True)
    picture(points, DOCS / "pictures" / "scale.png")
    rows = "\n".join(point.row() for point in points)
    (DOCS / "reference" / "scale.md").write_text(f"{PAGE}{rows}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
