"""Turns saved measurements into Markdown tables and pictures.

    pytest bench --benchmark-only --benchmark-json=bench.json
    lancet bench overlap --output overlap.json
    torchrun --nproc-per-node 4 bench/cpu/square_ring.py --json > ring.json
    python -m bench.report bench.json overlap.json ring.json --output-folder report

Writes report.md and, where there is something to draw, roofline.png (TFLOP/s over FLOPs per byte), eta.png
(how close fused launches come to the longer of their parts) and iteration.png (where an iteration goes, like
figure 13 of the Lancet paper). Every table and picture says where its numbers come from; of benchmarks that
ran without a GPU there are tables, and no pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.drawing import Chart, picture
from lancet_kernels.errors import UserError

PARTS = (
    ("computation_ms", "computation, not overlapped"),
    ("overlapped_ms", "overlapped"),
    ("communication_ms", "communication, not overlapped"),
)
"""Figures of an iteration: name, and what stands above its column."""
OURS, PEER = "#e45756", "#4c78a8"
MARKS = "osD^vPX*<>"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="saved JSON")
    parser.add_argument("--output-folder", default="report", metavar="DIR", help="default: report")
    options = parser.parse_args(argv)
    try:
        print(write(options.files, Path(options.output_folder)))
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


def write(files: Sequence[str], folder: Path) -> str:
    """Write report.md and the pictures. -> what was written, a line each."""
    benchmarks, iterations, rings = [], [], []
    for name in files:
        data = _load(name)
        if "benchmarks" in data:
            benchmarks.append((Path(name).name, data))
        elif "rings" in data:
            rings.append((Path(name).name, data))
        else:
            iterations.append((Path(name).name, data))
    folder.mkdir(parents=True, exist_ok=True)
    parts, written = ["# Measurements"], []
    for name, data in benchmarks:
        rows = [_row(b) for b in data["benchmarks"]]
        parts.append(_heading(name, data, rows))
        parts += _tables(rows)
        suffix = "" if len(benchmarks) == 1 else f"-{Path(name).stem}"
        on_gpu = [r for r in rows if "label" not in r]
        for title, draw, found in (
            ("roofline", _roofline, [r for r in on_gpu if r.get("flops") and r.get("bytes")]),
            ("eta", _eta, etas(on_gpu)),
        ):
            if found:
                path = folder / f"{title}{suffix}.png"
                _picture(path, draw, found, _where(rows))
                parts.append(f"![{title}]({path.name})")
                written.append(path)
    parts += [_ring_table(name, data) for name, data in rings]
    for name, data in iterations:
        path = folder / ("iteration.png" if len(iterations) == 1 else f"iteration-{Path(name).stem}.png")
        parts.append(_iteration_table(name, data))
        _picture(path, _iteration, data, f"{data['model']}, {data['ranks']} ranks, {data['link']} link")
        parts.append(f"![iteration]({path.name})")
        written.append(path)
    report = folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return "\n".join(str(path) for path in (report, *written))


def _load(name: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "measurements", got=f"{name} ({error})", expected="a JSON file", do="name another"
        ) from error
    known = isinstance(data, dict) and (
        "benchmarks" in data or "rings" in data or {"iteration_ms", "exposed_ms"} <= set(data)
    )
    if not known:
        raise UserError(
            "measurements",
            got=f"{name}, of another sort",
            expected="what pytest --benchmark-json, lancet bench overlap --output or square_ring.py --json "
            "has written",
            do="check the file",
        )
    return data


def _row(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    info = benchmark["extra_info"]
    median_ms = benchmark["stats"]["median"] * 1e3
    workload = info.get("workload")
    return {
        **info,
        "group": benchmark["group"],
        "workload": workload.split(" (")[0] if workload else benchmark["group"].removeprefix("planning "),
        "kernel": info["kernel"].split(" gpt2")[0],
        "sizes": workload,
        "ms": median_ms,
        "tflops": info.get("flops", 0.0) / median_ms * 1e-9,
    }


def _where(rows: Sequence[Mapping[str, Any]]) -> str:
    """Device, and what the numbers are not."""
    devices = ", ".join(sorted({r["device"] for r in rows}))
    labels = sorted({r["label"] for r in rows if "label" in r})
    return devices + ("" if not labels else f" ({'; '.join(labels)})")


def _heading(name: str, data: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"## {name}", f"{_where(rows)}, {data['datetime'][:10]}. Medians in ms."]
    if any("label" in r for r in rows):
        lines.append(
            "**Not a measurement of a GPU.** Our kernels ran in Triton's interpreter at tiny sizes, to prove "
            "that they run; comparing them with the others in these tables means nothing, so there is no "
            "picture of them."
        )
    return "\n\n".join(lines)


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One per kernel: workloads down, contenders across."""
    tables = []
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        here = [r for r in rows if r["kernel"] == kernel]
        contenders = list(dict.fromkeys(r["contender"] for r in here))
        measured = [r for r in here if "roofline_share" in r]
        head = ["", *contenders]
        if measured:
            head.append("best share of the roofline")
        lines = [_line(head), _line(["---"] * len(head))]
        for workload in dict.fromkeys(r["workload"] for r in here):
            by_contender = {r["contender"]: r for r in here if r["workload"] == workload}
            sizes = next(iter(by_contender.values())).get("sizes") or workload
            ms = {name: f"{r['ms']:.3f}" for name, r in by_contender.items()}
            cells = [sizes, *(ms.get(name, "-") for name in contenders)]
            if measured:
                best = max(by_contender.values(), key=lambda r: r.get("roofline_share", 0.0))
                cells.append(f"{best['roofline_share']:.0%} ({best['contender']})")
            lines.append(_line(cells))
        tables.append(f"### {kernel}\n\n" + "\n".join(lines))
    tables += _peer_tables(rows)
    found = etas([r for r in rows if "label" not in r])
    if found:
        head = ["fused", "longer part", "its ms", "fused ms", "eta"]
        lines = [_line(head), _line(["---"] * len(head))]
        lines += [
            _line(
                [e["group"], e["longer"], f"{e['longer_ms']:.3f}", f"{e['fused_ms']:.3f}", f"{e['eta']:.2f}"]
            )
            for e in found
        ]
        note = "eta = the longer of communication and GEMMs alone / fused; 1 hides the shorter one entirely."
        tables.append(f"### Overlap\n\n{note}\n\n" + "\n".join(lines))
    return tables


def _peer_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Times and memory of the layer and its peers, and ours over each; rows that have them."""
    tables = []
    for title, key, unit in (
        ("The MoE layer beside its peers", "median_ms", "ms, and ours over it"),
        ("Most memory of one pass", "peak_mib", "MiB, and times what autograd must keep of rows"),
    ):
        here = [r for r in rows if key in r]
        if not here:
            continue
        peers = list(dict.fromkeys(peer for r in here for peer in r[key]))
        lines = [_line(["", *peers]), _line(["---"] * (len(peers) + 1))]
        for r in here:
            cells = []
            for peer in peers:
                value = r[key].get(peer)
                if value is None:
                    cells.append("-")
                    continue
                ratio = r["ours_over"].get(peer) if key == "median_ms" else value / r["kept_mib"]
                cells.append(f"{value:.0f}" + ("" if ratio is None else f" ({ratio:.2f})"))
            lines.append(_line([r["sizes"] or r["workload"], *cells]))
        tables.append(f"### {title}\n\n{unit}\n\n" + "\n".join(lines))
    return tables


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def etas(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """eta of each group that has a fused launch and both of its parts.

    Example: gemm 2 ms, communication 1 ms, fused 2.5 ms -> eta 0.8.
    """
    found = []
    for group in dict.fromkeys(r["group"] for r in rows):
        by_role = {r["role"]: r["ms"] for r in rows if r["group"] == group and r.get("role")}
        if {"fused", "gemm", "communication"} <= set(by_role):
            longer = max(("gemm", "communication"), key=by_role.__getitem__)
            found.append(
                {
                    "group": group,
                    "longer": longer,
                    "longer_ms": by_role[longer],
                    "fused_ms": by_role["fused"],
                    "eta": by_role[longer] / by_role["fused"],
                }
            )
    return found


def _iteration_table(name: str, data: Mapping[str, Any]) -> str:
    head = ["strategy", "iteration", *(label for _, label in PARTS)]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in iteration_parts(data):
        total = data["iteration_ms"][row["strategy"]]
        lines.append(_line([row["strategy"], f"{total:.1f}", *(f"{row[part]:.1f}" for part, _ in PARTS)]))
    link = f"{data['link']} link of {data['link_gbps']:.3g} Gbit/s" if "link_gbps" in data else data["link"]
    where = f"{data['model']}, {data['ranks']} ranks on {data['device']}, {link}. Medians in ms."
    return f"## {name}\n\n{where}\n\n" + "\n".join(lines)


def _ring_table(name: str, data: Mapping[str, Any]) -> str:
    """The table of bench/cpu/square_ring.py."""
    head = "ring|exposed|waited for|share|share of medians|late ranks|peak MB|of Megatron's".split("|")
    lines = [_line(head), _line(["---"] * len(head))]
    for ring, of in data["rings"].items():
        times = [
            f"{of[key]['least']:.1f} ({of[key]['median']:.1f})"
            for key in ("exposed_ms", "waited_for_ms", "late_ranks_ms")
        ]
        shares = [f"{of[key]:.1%}" for key in ("exposed_share", "exposed_share_of_medians")]
        peak = [f"{of['peak_mb']:.1f}", f"{of['peak_mb'] / data['megatron_peak_mb']:.0%}"]
        lines.append(_line([ring, *times[:2], *shares, times[2], *peak]))
    where = (
        f"{data['layers']} MLP blocks {data['width']} x {data['hidden']}, {data['rows']} rows, "
        f"{data['ranks']} ranks on {data['device']}, torch {data['torch']}, {data['link']} link of "
        f"{data['link_gbps']:g} Gbit/s, {data['datetime'][:10]}. ms of a forward and backward: least of "
        f"{len(data['rings']['alternating']['exposed_ms']['rounds'])} rounds (median)."
    )
    return f"## {name}\n\n{where}\n\n" + "\n".join(lines)


def iteration_parts(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Computation alone, overlapped, communication alone, in ms, of each strategy.

    Example: iteration 10, all-to-all 4, exposed 1 -> computation 6, overlapped 3, communication 1.
    """
    rows = []
    for name, total in data["iteration_ms"].items():
        exposed = data["exposed_ms"][name]
        # A link that is paced sends on while nobody waits: never more overlapped than it was busy, never
        # below 0.
        overlapped = max(0.0, data["all_to_all_ms"][name] - exposed)
        times = (total - overlapped - exposed, overlapped, exposed)
        rows.append({"strategy": name} | {part: ms for (part, _), ms in zip(PARTS, times, strict=True)})
    return rows


def _picture(path: Path, draw, found, where: str) -> None:
    with picture(str(path), 10, 6, "", dpi=110) as figure:
        title = draw(figure.subplots(), found)
        figure.suptitle(f"{title}\n{where}", fontsize=10)


def _roofline(panel, rows: Sequence[Mapping[str, Any]]) -> str:
    kernels = list(dict.fromkeys(r["kernel"] for r in rows))
    for kernel, mark in zip(kernels, MARKS * len(kernels), strict=False):
        for ours, colour in ((True, OURS), (False, PEER)):
            here = [r for r in rows if r["kernel"] == kernel and r["ours"] == ours]
            x = [r["flops"] / r["bytes"] for r in here]
            label = kernel if ours else None
            panel.plot(x, [r["tflops"] for r in here], mark, color=colour, alpha=0.8, label=label)
    roofs = {(r["peak_tflops"], r["peak_gb_per_s"], r["peaks"]) for r in rows if "peaks" in r}
    least, most = (f(r["flops"] / r["bytes"] for r in rows) for f in (min, max))
    for tflops, gb_per_s, name in sorted(roofs):
        ridge = tflops * 1e3 / gb_per_s
        x = [least / 2, ridge, max(2 * most, 2 * ridge)]
        roof = [min(tflops, i * gb_per_s * 1e-3) for i in x]
        panel.plot(x, roof, color="black", linewidth=1)
        panel.text(x[-1], roof[-1], f"{name}, {tflops:g} TFLOP/s", ha="right", va="bottom", fontsize=8)
    panel.set(xscale="log", yscale="log", xlabel="FLOPs per byte moved at least", ylabel="TFLOP/s")
    panel.legend(frameon=False, fontsize=8, title="red: ours, blue: peers")
    return "Roofline" if roofs else "TFLOP/s by intensity; no roof is known for this device"


def _eta(panel, found: Sequence[Mapping[str, Any]]) -> str:
    names = [e["group"] for e in found]
    values = [e["eta"] for e in found]
    panel.barh(names, values, color=OURS)
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set_xlim(0, max(1.1, 1.1 * max(values)))
    panel.invert_yaxis()
    for place, value in enumerate(values):
        panel.text(value, place, f" {value:.2f}", va="center", fontsize=8)
    panel.set_xlabel("eta = longer part alone / fused")
    return "Overlap efficiency of the fused launches"


def _iteration(panel, data: Mapping[str, Any]) -> str:
    Chart("stack", ("strategy",), tuple(part for part, _ in PARTS)).draw([panel], iteration_parts(data))
    panel.set_ylim(0, 1.25 * max(data["iteration_ms"].values()))
    panel.legend(frameon=False, fontsize=8)
    return "Where an iteration goes (measured)"


if __name__ == "__main__":
    sys.exit(main())
