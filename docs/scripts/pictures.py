"""The pictures of the documentation, into docs/pictures/.

python docs/scripts/pictures.py            # a minute: plans a gpt2-s-moe step for 16 GPUs
python docs/scripts/pictures.py rows fused # some of them
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

FOLDER = Path(__file__).parents[1] / "pictures"
COLOURS = ("#4c78a8", "#f2b25c", "#54a24b", "#e45756")


def timeline(path: Path) -> None:
    """Blocking training and the plan that `auto` chooses: two rows of what `lancet plan --timeline` draws."""
    from lancet_kernels.predict.simulate import Setting, simulate_setting
    from lancet_kernels.schedules.time.timeline import save_picture

    found = simulate_setting(Setting(model="gpt2-s-moe", cluster="p4de", gpus=16))
    save_picture(
        {name: found.timelines[name].events for name in ("none", "auto")},
        path,
        weight_gradients=found.weight_gradients,
        title=f"Simulated: {found.setting.describe()}",
    )


def rows(path: Path) -> None:
    """Where rows lie before and after the dispatch: 2 ranks, 4 experts, top-1, 6 tokens each."""
    chosen = {0: [2, 0, 0, 3, 1, 2], 1: [1, 3, 0, 1, 1, 2]}
    figure = Figure(figsize=(9, 4.6))
    axes = figure.subplots(3, 2)
    for rank in range(2):
        tokens = [(rank, token, expert) for token, expert in enumerate(chosen[rank])]
        _cells(axes[0, rank], tokens, f"rank {rank}: tokens in their order")
        _cells(
            axes[1, rank], sorted(tokens, key=lambda row: row[2]), "to send: by expert, one block per rank"
        )
        everything = [(r, t, e) for r in range(2) for t, e in enumerate(chosen[r])]
        received = sorted(
            (row for row in everything if row[2] // 2 == rank), key=lambda row: (row[2], row[0])
        )
        title = f"received: experts {2 * rank} and {2 * rank + 1}, each one group"
        _cells(axes[2, rank], received, title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _cells(axes: Axes, cells: list[tuple[int, int, int]], title: str) -> None:
    """(source rank, token, expert) of each row, in the colour of its expert."""
    for place, (source, token, expert) in enumerate(cells):
        axes.add_patch(Rectangle((place, 0), 1, 1, facecolor=COLOURS[expert], edgecolor="white"))
        axes.text(
            place + 0.5, 0.62, f"r{source} t{token}", ha="center", va="center", color="white", fontsize=8
        )
        axes.text(place + 0.5, 0.28, f"expert {expert}", ha="center", va="center", color="white", fontsize=7)
    axes.set_xlim(0, 8)
    axes.set_ylim(0, 1)
    axes.set_title(title, fontsize=9, loc="left")
    axes.axis("off")


def fused(path: Path) -> None:
    """Who waits for whom in one fused forward launch on two ranks."""
    figure = Figure(figsize=(9, 4.4))
    axes = figure.subplots()
    columns = (
        "put rows to\nthe expert's rank",
        "first GEMM tiles\nand activation",
        "second GEMM tiles,\nput results back",
        "weighted sum\nper token",
    )
    for rank, y in ((0, 2.2), (1, 0.0)):
        axes.text(-0.35, y + 0.5, f"rank {rank}", rotation=90, va="center", fontsize=10)
        for column, text in enumerate(columns):
            box = FancyBboxPatch(
                (2.6 * column, y), 1.7, 1, boxstyle="round,pad=0.05", facecolor=COLOURS[column]
            )
            axes.add_patch(box)
            axes.text(
                2.6 * column + 0.85, y + 0.5, text, ha="center", va="center", color="white", fontsize=8.5
            )
    across = {0: "signal:\nrows are here", 1: "tile counter", 2: "signal:\nresults are here"}
    for column, text in across.items():
        for source, target in ((2.7, 2.7), (0.5, 0.5), (2.7, 0.5), (0.5, 2.7)):
            if column == 1 and source != target:
                continue  # the GEMMs of a rank wait for its own tiles alone
            axes.annotate(
                "",
                (2.6 * column + 2.52, target),
                (2.6 * column + 1.8, source),
                arrowprops={"arrowstyle": "->", "color": "#555555", "lw": 1.2},
            )
        axes.text(2.6 * column + 2.15, 3.45, text, ha="center", fontsize=8, color="#333333")
    axes.set_xlim(-0.6, 9.8)
    axes.set_ylim(-0.3, 4.0)
    axes.axis("off")
    axes.set_title(
        "A task waits for what its arrows come from; no task waits for a whole all-to-all", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def square(path: Path) -> None:
    """The MLP block of OPT 6.7B under Megatron's partition and PrimePar's, simulated."""
    sys.path.insert(0, str(FOLDER.parents[1]))
    from bench.papers.primepar import timelines

    timelines(path)


PICTURES = {"timeline": timeline, "rows": rows, "fused": fused, "square": square}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or PICTURES:
        PICTURES[name](FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
