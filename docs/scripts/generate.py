"""Generates parts of the documentation from the code and from measurements: command-line options, set-ups,
versions, an example, the account of a step.

    python docs/scripts/generate.py         writes them into the pages, between two comments:

    <!-- generated: versions -->
    ...
    <!-- end -->

A test compares the pages with the generated parts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SETUPS = "tests/lancet_kernels/optimization/test_setups.py"


def command_line() -> str:
    """A section for each command of `lancet`, from its parser."""
    from lancet_kernels.__main__ import _parser

    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    sections: list[str] = []
    for name, parser in commands.choices.items():
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        rows = [_option(action) for action in shown if not isinstance(action, argparse._HelpAction)]
        sections += [f"## `lancet {name}`", "", _escaped(parser.description or ""), ""]
        sections += [*_table(("option", "meaning"), rows), ""]
    return "\n".join(sections)


def _results(name: str) -> Any:
    """A file of bench/results."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def _option(action: argparse.Action) -> tuple[str, str]:
    """Names and meaning."""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    if action.nargs != 0 and action.option_strings:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        value = action.metavar or choices
        names += f" `[{value}]`" if action.nargs == "?" else f" `{value}`"
    text = action.help or ""
    if "%(default)s" in text:
        text %= {"default": action.default}
    return names, _escaped(text)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def support() -> str:
    """Tables of set-ups around `optimize`, with their tests, and of model families."""

    sys.path.insert(0, str(ROOT))
    from tests.lancet_kernels.optimization import test_setups
    from tests.transformers_models import EXPERT_PARALLEL, LORA, LORA_WAYS, PLANNED

    outcomes = {
        "works": test_setups.WORKS,
        "falls back": test_setups.FALLS_BACK,
        "refused": test_setups.REFUSED,
    }
    setups = [
        (_escaped(test.__doc__.splitlines()[0].removesuffix(".")), outcome, f"`{test.__name__}`")
        for outcome, tests in outcomes.items()
        for test in tests
    ]
    planned = {family for family, *_ in PLANNED}
    sharded = [(family, "works", "works" if family in planned else "untested") for family in EXPERT_PARALLEL]
    return "\n".join(
        [
            "## A model around `optimize`",
            "",
            "*Works*: the plan runs, with the plain module's loss and gradients. *Falls back*: the plain "
            "module runs, with the same gradients, a warning, and a count in `fallbacks`. *Refused*: one "
            "line says what to change, before a rank communicates. Each row is a function in "
            f"`{SETUPS}`, run on 1 and 2 ranks.",
            "",
            *_table(("set-up", "outcome", "test"), setups),
            "",
            "## Models of transformers",
            "",
            "`convert`: [all families of transformers](families.md), with loss and all gradients beside the "
            "original's.",
            "",
            '`ep_implementation="lancet"`: loss and all gradients are compared with those of `"all_to_all"` '
            "on 2 and 4 ranks, with FSDP, in `tests/lancet_kernels/transformers/`.",
            "",
            *_table(("family", "without a plan", "under `optimize`, also in microbatches"), sharded),
            "",
            "LoRA by PEFT on a converted model, with and without activation checkpointing: all gradients are "
            "compared with those of one process, on 2 ranks, in "
            "`tests/lancet_kernels/transformers/test_lora.py`. There, too: the same on one rank without "
            'conversion, by `experts_implementation="lancet"`, and adapters of attention under '
            '`ep_implementation="lancet"`. Adapters of experts that transformers has divided (PEFT adds '
            "plain tensors to DTensors, 2026-11-27) fail with its own implementation as with ours: convert "
            "instead.",
            "",
            *_table(("adapters of", *LORA_WAYS.values()), [(name, *["works"] * 3) for name in LORA]),
        ]
    )


WAYS = {
    "converted": "`convert`", "optimize": "`optimize`", "expert parallel": "EP", "plan --hf": "`plan --hf`",
}  # fmt: skip
RIGHT = {"": "yes", "not cut": "yes, not cut"}


def by_family() -> Mapping[str, Mapping[str, Any]]:
    """Results of each family of transformers."""
    return _results("transformers-families")["families"]


def families() -> str:
    """Results of each family of transformers, and of transformers' own tests; then reasons of failures."""
    rows, reasons = [], []
    for family, results in by_family().items():
        refused = {way: results[way] for way in WAYS if results.get(way) not in (None, *RIGHT)}
        cells = [RIGHT.get(results[way], "no") if way in results else "" for way in WAYS]
        mixins = results.get("mixins", {})
        passed = [f"{m['of'] - len(m['failed'])} of {m['of']}" for m in mixins.values()]
        tests = [next(iter(passed[i : i + 1]), "") for i in range(2)]
        rows.append((family, *cells, *tests, results.get("activation", "")))
        reasons += [f"- {family}, {WAYS[way]}: {_escaped(line)}" for way, line in refused.items()]
    head = ("family", *WAYS.values(), "their tests, ours", "theirs", "activation")
    return "\n".join([*_table(head, rows), "", "Why not:", "", *reasons])


def example() -> str:
    """The example of the first page, to copy."""
    text = (ROOT / "examples" / "hugging_face.py").read_text()
    return f"<!-- not run: a test runs it -->\n```python\n{text}```"


def versions() -> str:
    """The versions in `constraints.txt` of packages that users need."""
    packages = ("torch", "triton", "numpy", "matplotlib", "tqdm", "transformers")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    return "\n".join(_table(("package", "version"), [(name, pinned[name]) for name in packages]))


def overlap(run: str = "emulated-2-core-cpu") -> str:
    """A committed run of `lancet bench overlap`, and where the milliseconds of each strategy go."""
    figures = _results(f"overlap-{run}")
    times: Mapping[str, float] = figures["iteration_ms"]
    rows = {"iteration": times, "predicted": figures["predicted_ms"]}
    accounts: Mapping[str, Mapping[str, float]] = figures["account_ms"]
    parts = dict.fromkeys(part for account in accounts.values() for part in account)
    ms = {part: {name: account.get(part, 0.0) for name, account in accounts.items()} for part in parts}
    rows |= {part.replace("_", "-"): values for part, values in ms.items() if any(values.values())}
    lines = _table(
        ["ms", *(f"`{name}`" for name in times)],
        [[what, *(f"{row[n]:.0f}" if n in row else "" for n in times)] for what, row in rows.items()],
    )
    rivals = [name for name in ("none", "tutel") if name in times]
    rival = min(times[name] for name in rivals)
    own = [n for n in times if n in figures["predicted_ms"] and n not in ("none", "tutel")]
    fastest = min(own, key=times.__getitem__)
    named = [name for name in dict.fromkeys(("auto", fastest)) if name in times]
    gains = ", ".join(f"`{name}` {rival / times[name]:.2f}x" for name in named)
    exposed = {n: accounts[n]["exposed all_to_all"] for n in accounts}
    on_gpu = figures.get("device") == "cuda"
    computation = "time of the GPU without waits" if on_gpu else "CPU time"
    slower = f"{'the faster of ' * (len(rivals) - 1)}`{'` and `'.join(rivals)}`"
    text = (
        f"Speedup over {slower}: {gains}. `{named[0]}` exposes "
        f"{1 - exposed[named[0]] / exposed['none']:.0%} less all-to-all than `none`. Predicted iteration "
        f"times are off by {figures['prediction_error']:.1%} on average. Computation: the {computation} "
        "of `none`; cutting: what a column needs beyond it (negative: less)."
    )
    if not on_gpu:
        text += (
            " Late rank: waiting for a rank that reached the collective later, and for counts; no core: "
            "ready to compute, but no CPU core was free; other: the rest, not measured."
        )
    return "\n".join([*lines, "", text.replace("%", " %")])


STANDS_FOR = "stands-for-16-emulated-2-core-cpu"


def stand_ins() -> str:
    """The strategies on two real ranks and on one that stands for others: their time as a share of `none`."""
    runs = {"two ranks": "emulated-2-core-cpu", "one rank stands for 16": STANDS_FOR}
    shares: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        times = _results(f"overlap-{run}")["iteration_ms"]
        shares[name] = {strategy: ms / times["none"] for strategy, ms in times.items() if strategy != "none"}
    strategies = list(shares["two ranks"])
    rows = [[name, *(f"{share[strategy]:.2f}" for strategy in strategies)] for name, share in shares.items()]
    return "\n".join(_table(["step, `none` = 1", *(f"`{name}`" for name in strategies)], rows))


FIGURES = {
    "ms": "ms", "tflops": "TFLOP/s", "eta": "η", "predicted_ms": "predicted ms", "exposed_ms": "exposed ms",
    "host_ms": "host ms", "kernels_ms": "kernels ms",
}  # fmt: skip


def faults() -> str:
    """How jobs ended with a fault of one rank (`bench.cpu.faults`)."""
    figures = _results("faults-2-core-cpu")
    rows = []
    for end in figures["ends"]:
        fault, after_s = end["fault"], end["after_s"]
        lost = f"{end['lost']} step{'s' * (end['lost'] > 1)}, trained again" if end["lost"] else "nothing"
        rows.append(
            (
                f"{fault['kind']}, {fault['place']}",
                fault["way"],
                "went on" if after_s is None else f"{after_s:.1f} s",
                _escaped(end["said"]) or "-",
                lost if end["same"] else "OTHER LOSSES AFTERWARDS",
            )
        )
    return "\n".join(_table(("rank 1", "two ranks share", "ended after", "said", "lost"), rows))


def drawn() -> str:
    """Outcomes of the set-ups that `tests.generated_setups` draws, and reasons."""
    runs = [_results(f"drawn-set-ups-{ranks}-ranks") for ranks in (2, 4)]
    columns = [Counter[str](run["ends"]) for run in runs]
    for run, column in zip(runs, columns, strict=True):
        for reason, count in run["reasons"].items():
            column[_kind_of_reason(reason)] += count
    names = {"right": "as the plain module, by its plan", "without its plan": "so, in part without a plan"}
    first = ["right", "without its plan", "refused", "failed"]
    others = [kind for kind, _ in (columns[0] + columns[1]).most_common() if kind not in first]
    rows = [(_escaped(names.get(k, k)), *(str(column[k]) for column in columns)) for k in (*first, *others)]
    return "\n".join(_table(("what", *(f"{run['ranks']} ranks, {run['date']}" for run in runs)), rows))


def _kind_of_reason(reason: str) -> str:
    """A reason without its place: `refused: expected nn.Parameter`, `without its plan: no longer so`."""
    end, _, why = reason.partition(": ")
    if end == "refused":
        return f"{end}: expected {why.partition(', expected ')[2].partition(';')[0]}"
    return f"{end}: {re.sub(r'^rank N: ', '', why).partition(':')[0]}"


def first_run(folder: Path = ROOT / "bench" / "results") -> str:
    """Each committed first run on a GPU: the outcome of its steps, and their figures."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("first-run-*.jsonl"))]
    parts = []
    for head, *lines in ([*map(json.loads, text.splitlines())] for text in texts):
        run = head["run"]
        if run["label"] != "measured":
            continue
        rows = [
            (f"`{line['step']}`", what, *(f"{numbers[key]:.4g}" if key in numbers else "" for key in FIGURES))
            for line in lines
            if line["outcome"] != "not begun"
            for what, numbers in [(line["outcome"], {}), *_figures(line.get("result", {}))]
        ]
        parts += [f"{run['device']}, torch {run['torch']}, Triton {run['triton']}, {run['date']}:"]
        parts += ["", *_table(("step", "", *FIGURES.values()), rows), ""]
    return "\n".join(parts) or "Not measured: no GPU was at hand."


def _figures(result: Mapping[str, object], name: str = "") -> Iterable[tuple[str, Mapping[str, float]]]:
    """Parts of a result, at any depth, that have one of FIGURES."""
    numbers = {key: value for key, value in result.items() if isinstance(value, (int, float))}
    if numbers.keys() & FIGURES.keys():
        yield name, numbers
    for key, value in result.items():
        if isinstance(value, dict):
            yield from _figures(value, f"{name}, {key}" if name else key)


PARTS: Mapping[str, Callable[[], str]] = {
    "command_line": command_line,
    "support": support,
    "families": families,
    "versions": versions,
    "example": example,
    "overlap": overlap,
    "overlap_accumulated": partial(overlap, "accumulate-4-emulated-2-core-cpu"),
    "overlap_netns": partial(overlap, "netns-2-core-cpu"),
    "overlap_large_step": partial(overlap, "large-step-h100"),
    "overlap_stands_for": partial(overlap, STANDS_FOR),
    "stand_ins": stand_ins,
    "first_run": first_run,
    "faults": faults,
    "drawn": drawn,
}
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CONVERTED = re.compile(r"\d+( families\]\([\w./]*families\.md\))")


def filled(page: str) -> str:
    """A page with its generated parts as they should be, and the number of families that `convert` takes."""
    converted = sum(results["converted"] == "" for results in by_family().values())
    page = _CONVERTED.sub(rf"{converted}\1", page)
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]().strip()}\n{part[3]}", page)


def main() -> None:
    """Write the generated parts into all pages."""
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (new := filled(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
