"""HiDup's evaluation as claims, text and pictures."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lancet_kernels.paper.drawing import grouped_bars, picture
from lancet_kernels.paper.hidup import ASSUMPTIONS
from lancet_kernels.paper.hidup import run_figures as simulate
from lancet_kernels.paper.text_table import table

__all__ = ["ASSUMPTIONS", "as_json", "claims", "save_pictures", "simulate", "text"]

PAPER_TABLE_4 = {
    ("one machine", "hidup"): (297.2, 294.8, 29.7, 0.9192),
    ("one machine", "expert parallel"): (398.8, 353.1, 28.2, 0.0),
    ("100 Gbit/s", "hidup"): (398.5, 308.8, 152.3, 0.4110),
    ("100 Gbit/s", "expert parallel"): (499.3, 347.9, 134.7, 0.0),
    ("30 Gbit/s", "hidup"): (665.7, 302.1, 443.2, 0.2635),
    ("30 Gbit/s", "expert parallel"): (825.1, 346.9, 458.5, 0.0),
}
"""Milliseconds of the iteration, computation, communication; share overlapped. Expert parallel: DeepSpeed."""
PAPER_TABLE_5 = {
    "20% random noise": 1.002,
    "50% random noise": 1.129,
    "+20% communication": 1.0,
    "+50% communication": 1.0,
    "-20% communication": 1.0,
    "-50% communication": 1.172,
}
CLAIM = {"claim": "{name}", "paper": "{paper}", "simulated": "{ours}", "holds": "{holds}"}
COMPARABLE = 0.9
MOST_SLOPE = 1.2
"""Of the second half of a curve, as a multiple of the first half's, in one that is linear but for noise."""
WHY = {
    "figure 6: most speedup, ViT": "here the 9.71 Gbit/s link works six times as long as the GPUs, so hiding "
    "all computation gains a sixth; the paper says that in its ViT both are closer to each other",
    "figure 12: at 100 Gbit/s GShard's all-to-alls around the experts": "between two machines an all-reduce "
    "of the experts' gradients takes less time than the tokens' four all-to-alls",
    "figure 12: at 10 Gbit/s the gate is computed on every card": "here whole experts are cheapest, so no "
    "token travels; the rates that the authors measured at 10 Gbit/s made all-to-alls 1.5 times as fast as "
    "such a link is, because their limiter let bursts pass",
    "table 4: share overlapped at 100 and 30 Gbit/s": "here the backward overlaps as equation (5) says; "
    "searched and counted as published, without overlap in the backward, they are near the paper's",
    "table 5: costs that are off by 20 % cost at most 2 %": "the search keeps the fastest 200 "
    "strategies behind a cut, so two searches may differ by some percent whatever the costs",
}
"""Where ours differs from the paper, and why."""


def claims(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the paper says, what the simulation says, and whether it holds."""
    checks: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
        "6": _figure6,
        "7": _figure7,
        "8": _figure8,
        "11": _figure11,
        "12": _figure12,
        "14": _figure14,
        "table 4": _table4,
        "table 5": _table5,
    }
    return [
        claim for number, check in checks.items() if number in figures for claim in check(figures[number])
    ]


def _claim(name: str, paper: str, ours: str, holds: bool) -> dict[str, Any]:
    entry = {"name": name, "paper": paper, "ours": ours, "holds": bool(holds)}
    return entry if holds or name not in WHY else entry | {"why": WHY[name]}


def _figure6(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    most = {
        kind: max(row["speedup"] for row in rows if row["model"].startswith(kind)) for kind in ("bert", "vit")
    }
    return [
        _claim(
            "figure 6: most speedup, BERT", "1.18x", f"{most['bert']:.2f}x", abs(most["bert"] - 1.18) < 0.05
        ),
        _claim("figure 6: most speedup, ViT", "1.61x", f"{most['vit']:.2f}x", abs(most["vit"] - 1.61) < 0.2),
    ]


def _figure7(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speedups = [row["speedup"] for row in rows]
    name = "figure 7: comparable with data parallel within a machine (10 %)"
    return [_claim(name, "comparable", _range(speedups), min(speedups) >= COMPARABLE)]


def _figure8(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speedups = [row["speedup"] for row in rows]
    return [
        _claim("figure 8: faster at every bandwidth", "up to 1.14x", _range(speedups), min(speedups) >= 1)
    ]


def _figure11(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sharded = {row["gbit_per_s"]: row["sharded_published"] for row in rows}
    ours = ", ".join(f"{count} at {gbit}" for gbit, count in sharded.items())
    return [
        _claim(
            "figure 11: more parameters sharded at high bandwidth (searched as published)",
            "replicated at low, sharded at high",
            f"{ours} Gbit/s",
            sharded[100] > sharded[30] > sharded[10],
        )
    ]


def _figure12(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    layers = {row["gbit_per_s"]: row["layer_published"] for row in rows}
    exchanged = sum("all_to_all" in line for line in layers[100])
    everywhere = any("gate (whole, whole, whole)" in line for line in layers[10])
    return [
        _claim(
            "figure 12: at 100 Gbit/s GShard's all-to-alls around the experts",
            "two all-to-alls",
            f"{exchanged} all-to-alls",
            exchanged >= 2,
        ),
        _claim(
            "figure 12: at 10 Gbit/s the gate is computed on every card",
            "whole gate",
            "whole gate" if everywhere else "gate on a rank's own tokens",
            everywhere,
        ),
    ]


def _figure14(data: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows, seconds = data["layers"], [row["seconds"] for row in data["gpus"]]
    # A graph without repeated layers has fewer cuts: what counts is what each further layer costs.
    fewest, middle, most = rows[0], rows[len(rows) // 2], rows[-1]
    slopes = [
        (end["seconds"] - begin["seconds"]) / max(1, end["layers"] - begin["layers"])
        for begin, end in ((fewest, middle), (middle, most))
    ]
    return [
        _claim(
            "figure 14a: at most linear in layers",
            "linear",
            f"{slopes[0]:.2f} s for each layer up to {middle['layers']}, {slopes[1]:.2f} s for each up to "
            f"{most['layers']}",
            slopes[1] <= MOST_SLOPE * slopes[0],
        ),
        _claim(
            "figure 14b: independent of GPUs",
            "constant",
            f"{min(seconds):.1f} to {max(seconds):.1f} s",
            max(seconds) < 2 * min(seconds),
        ),
    ]


def _table4(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    share = {(row["setting"], row["system"]): row["overlapped"] for row in rows}
    single = share["one machine", "hidup"]
    slow = [share[setting, "hidup"] for setting in ("100 Gbit/s", "30 Gbit/s")]
    near = all(abs(ours - paper) < 0.15 for ours, paper in zip(slow, (0.41, 0.26), strict=True))
    return [
        _claim("table 4: share overlapped in one machine", "92 %", f"{single:.0%}", abs(single - 0.92) < 0.1),
        _claim(
            "table 4: share overlapped at 100 and 30 Gbit/s",
            "41 % and 26 %",
            f"{slow[0]:.0%} and {slow[1]:.0%}",
            near,
        ),
    ]


def _table5(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ratio = {row["noise"]: row["relative"] for row in rows}
    small = [ratio[n] for n in ("20% random noise", "+20% communication", "-20% communication")]
    return [
        _claim(
            "table 5: costs that are off by 20 % cost at most 2 %",
            "100.0 to 100.2 %",
            f"{min(small):.1%} to {max(small):.1%}",
            max(small) <= 1.02,
        )
    ]


def _range(speedups: list[float]) -> str:
    return f"{min(speedups):.2f}x to {max(speedups):.2f}x"


def as_json(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `--json`."""
    return {"paper": "hidup", "figures": figures, "claims": claims(figures)}


def text(figures: Mapping[str, Any]) -> str:
    """Figures, tables and claims."""
    lines = ["HiDup (SoCC '22) by simulation: nothing here was run on a GPU."]
    for number in ("6", "7", "8"):
        if number in figures:
            lines += ["", f"Figure {number}: iteration", *_iterations(figures[number])]
    if "11" in figures:
        lines += [
            "",
            "Figure 11: parameters of BERT-SGMoE, replicated and sharded",
            *_placements(figures["11"]),
        ]
    for row in figures.get("12", ()):
        lines += ["", f"Figure 12: first MoE layer, {row['gbit_per_s']} Gbit/s"]
        lines += [f"  {line}" for line in row["layer"]]
        lines += ["  searched as published:", *(f"  {line}" for line in row["layer_published"])]
    if "14" in figures:
        rows = [row for of in figures["14"].values() for row in of]
        lines += ["", "Figure 14: CPU time of the search, measured on this machine"]
        lines += table({"layers": "{layers}", "GPUs": "{gpus}", "s": "{seconds:.1f}"}, rows)
    if "table 4" in figures:
        lines += ["", "Table 4: an iteration of BERT-SGMoE, ms", *_breakdown(figures["table 4"])]
    if "table 5" in figures:
        lines += [
            "",
            "Table 5: time with a strategy found with wrong costs, over the one found with right costs",
        ]
        lines += table(
            {"noise": "{noise}", "simulated": "{relative:.1%}", "most": "{most:.1%}", "paper": "{paper:.1%}"},
            [r | {"paper": PAPER_TABLE_5[r["noise"]]} for r in figures["table 5"]],
        )
    rows = claims(figures)
    lines += ["", "Claims of the paper"]
    lines += table(CLAIM, [c | {"holds": "yes" if c["holds"] else "no"} for c in rows])
    lines += [f"  {c['name']}: {c['why']}." for c in rows if "why" in c]
    return "\n".join([*lines, "", "Assumptions", *(f"  - {a}" for a in ASSUMPTIONS)])


def _iterations(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "model": "{model}",
        "GPUs": "{gpus}",
        "machines": "{machines}",
        "Gbit/s": "{link}",
        "hidup ms": "{hidup_ms:.1f}",
        "no faster than": "{lower_bound_ms:.1f}",
        "gap": "{gap:.1%}",
        "best other": "{other[1]:.1f} ({other[0]})",
        "speedup": "{speedup:.2f}x",
        "overlapped": "{overlapped:.0%}",
        "GB a GPU": "{memory_gb:.1f}",
    }
    further = (
        {
            "link": "" if r["machines"] == 1 else r["gbit_per_s"] or 9.71,
            "gap": r["hidup_ms"] / r["lower_bound_ms"] - 1,
            "other": min(r["baselines_ms"].items(), key=lambda item: item[1]),
        }
        for r in rows
    )
    return table(columns, map(operator.or_, rows, further))


def _placements(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "Gbit/s": "{gbit_per_s}",
        "replicated": "{replicated}",
        "sharded": "{sharded}",
        "as published: replicated": "{replicated_published}",
        "as published: sharded": "{sharded_published}",
    }
    return table(columns, rows)


def _breakdown(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "setting": "{setting}",
        "system": "{system}",
        "iteration": "{wall_ms:.0f}",
        "computation": "{computation_ms:.0f}",
        "communication": "{communication_ms:.0f}",
        "overlapped": "{overlapped:.0%}",
    }
    names = list(columns)[2:]

    def paper(row: Mapping[str, Any]) -> dict[str, str]:
        values = PAPER_TABLE_4.get((row["setting"], row["system"]))
        shown = [*(f"{ms:.0f}" for ms in values[:3]), f"{values[3]:.0%}"] if values else [""] * 4
        return dict(zip(names, shown, strict=True))

    columns |= {f"paper: {name}": f"{{paper[{name}]}}" for name in names}
    return table(columns, [r | {"paper": paper(r)} for r in rows])


def save_pictures(figures: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """One picture per figure. -> their paths. Raises: OSError."""
    draw: dict[str, Callable[[Any, Any], None]] = dict.fromkeys(("6", "7", "8"), _draw_bars)
    draw |= {"11": _draw_placements, "12": _draw_layers, "14": _draw_seconds}
    files = {number: str(folder / f"hidup-figure{number}.png") for number in draw if number in figures}
    for number, path in files.items():
        title = f"Figure {number} of the HiDup paper (simulated)"
        with picture(path, 11, 3 if number == "12" else 5, title) as figure:
            draw[number](figure, figures[number])
    return files


def _draw_bars(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of an iteration: hidup beside the baselines, one group for each setting."""
    panel = figure.subplots()
    names = dict.fromkeys(name for r in rows for name in r["baselines_ms"])
    series = {name: [r["baselines_ms"].get(name, math.nan) for r in rows] for name in names}
    where = [f"{r['model']}\n{r['gpus']} GPUs" for r in rows]
    if rows[0]["gbit_per_s"]:
        where = [f"{w}\n{r['gbit_per_s']} Gbit/s" for w, r in zip(where, rows, strict=True)]
    grouped_bars(panel, where, {"hidup": [r["hidup_ms"] for r in rows], **series})
    panel.set_ylabel("ms an iteration")
    panel.legend()


def _draw_placements(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Parameters by bandwidth, replicated below sharded."""
    for panel, (suffix, title) in zip(
        figure.subplots(1, 2, sharey=True),
        (("_published", "searched as published"), ("", "backward overlaps as well")),
        strict=True,
    ):
        names = [f"{r['gbit_per_s']} Gbit/s" for r in rows]
        replicated = [r[f"replicated{suffix}"] for r in rows]
        panel.bar(names, replicated, 0.5, label="replicated")
        panel.bar(names, [r[f"sharded{suffix}"] for r in rows], 0.5, bottom=replicated, label="sharded")
        panel.set_title(title, fontsize=10)
        panel.legend()


def _draw_layers(figure: Any, rows: list[dict[str, Any]]) -> None:
    """The lines of each layer, side by side."""
    for panel, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
        panel.axis("off")
        panel.set_title(f"{row['gbit_per_s']} Gbit/s", fontsize=10)
        lines = ["backward overlaps as well", *row["layer"], "", "searched as published"]
        panel.text(
            0, 1, "\n".join([*lines, *row["layer_published"]]), va="top", fontsize=8, family="monospace"
        )


def _draw_seconds(figure: Any, data: dict[str, list[dict[str, Any]]]) -> None:
    """Seconds of the search over layers, and over GPUs."""
    for panel, (axis, of) in zip(
        figure.subplots(1, 2), (("layers", "layers"), ("GPUs", "gpus")), strict=True
    ):
        panel.plot([r[of] for r in data[of]], [r["seconds"] for r in data[of]], marker="o")
        panel.set_xlabel(axis)
        panel.set_ylabel("s of CPU time")
        panel.set_ylim(bottom=0)
