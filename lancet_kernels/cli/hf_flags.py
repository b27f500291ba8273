"""Options of `lancet plan --hf`: a model of transformers from its `config.json`."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lancet_kernels.cli import aligned
from lancet_kernels.cli.options import option, positive_float, positive_int
from lancet_kernels.errors import UserError, check_name
from lancet_kernels.files import file_errors, json_text
from lancet_kernels.schedules import MICROBATCHES

if TYPE_CHECKING:
    from lancet_kernels.predict.answer import Answer, Simulated
    from lancet_kernels.predict.measured import Difference
    from lancet_kernels.predict.question import Question
    from lancet_kernels.predict.search import SearchResult


OF_HF = (MICROBATCHES, "megatron", "megatron-dw", "graph-trainer")
"""Strategies that only `--hf` simulates: of several microbatches, and those of other systems."""


@dataclass(frozen=True)
class HfFlags:
    """Options of `--hf` alone."""

    hf: str | None = option(
        None, "plan a model of transformers from its config.json alone", metavar="CONFIG.JSON"
    )
    experts_over: int | None = option(
        None,
        "with --hf: GPUs that share one set of experts (default: all that divide them)",
        parse=positive_int,
    )
    fsdp: bool = option(
        False, "with --hf: shard parameters, gradients and optimizer (default: the optimizer)"
    )
    replicate: bool = option(False, "with --hf: shard nothing")
    sequence: int = option(4096, "with --hf: tokens of a sequence", parse=positive_int)
    microbatch: int = option(1, "with --hf: sequences per GPU and microbatch", parse=positive_int)
    accumulate: int = option(1, "with --hf: microbatches per step", parse=positive_int)
    recompute: str = option(
        "none",
        "with --hf: what the backward computes again; selective is attention",
        choices=("none", "full", "selective", "attention", "experts", "alternate"),
    )
    tensor: int = option(
        1, "with --hf: GPUs that share the tokens and slice dense layers, as Megatron", parse=positive_int
    )
    context: int = option(1, "with --hf: parts of each sequence, on GPUs of their own", parse=positive_int)
    cp_comm_type: str = option(
        "all_gather",
        "with --context: attention gathers keys and values, or exchanges tokens for heads (Ulysses)",
        choices=("all_gather", "a2a"),
    )
    states: str = option(
        "float32", "with --hf: dtype of gradients and Adam's moments", choices=("float32", "bfloat16")
    )
    routing: str = option(
        "balanced", "with --hf: balanced, zipf:S, or counts.json of a run; ,capacity:C behind it drops",
        metavar="HOW",
    )  # fmt: skip
    attention: str = option(
        "", "with --hf: whose attention kernel is assumed: cudnn, flash-attention-3, flash-attention-2, flex "
        "(default: as in [kernels] of the cluster)", metavar="NAME",
    )  # fmt: skip
    eager: bool = option(False, "with --hf: element-wise ops run one by one, as without torch.compile")
    dispatch: str = option(
        "all-to-all",
        "with --hf: whose all-to-all is assumed, if the cluster has it: all-to-all, deepep, hybridep, "
        "all-to-all-unfused, all-to-all-torchtitan, deepep-unfused, hybridep-32-sms",
        metavar="NAME",
    )
    search: bool = option(False, "with --hf: find the best layouts for the GPUs")
    search_seconds: float = option(
        60.0, "with --search: when it stops; it says what it did not try", parse=positive_float,
        metavar="SECONDS",
    )  # fmt: skip
    measured: str | None = option(
        None,
        "with --hf: a step's time on your machine, 24.7s or 850ms: what the difference may come from",
        metavar="TIME",
    )
    kineto: str | None = option(
        None, "with --measured: a trace of torch's profiler, which says it", metavar="TRACE.JSON"
    )
    report: str | None = option(None, "with --hf: write one page with everything (.html)", metavar="FILE")

    def question(self, cluster: str, gpus: int) -> Question:
        """Raises: UserError."""
        from lancet_kernels.predict.question import Question

        assert self.hf is not None
        if self.fsdp and self.replicate:
            raise UserError("options", got="--fsdp and --replicate", expected="one of them", do="drop one")
        sharding = "full" if self.fsdp else "none" if self.replicate else "optimizer"
        question = Question(
            self.hf, cluster, gpus, 1, sharding, self.sequence, self.microbatch, self.accumulate,
            self.recompute, self.dispatch, self.tensor, self.states,
            self.attention, self.routing, self.eager, self.context, self.cp_comm_type,
        )  # fmt: skip
        return replace(question, expert_ranks=self.experts_over or question.possible_expert_ranks[-1])


def run_hf(flags: HfFlags, cluster: str, gpus: int, strategy: str, arguments: argparse.Namespace) -> int:
    """Predict, print and write the requested files. -> exit code."""
    from lancet_kernels.predict.answer import AUTO, STRATEGIES, answer, check_fits

    check_name(
        "--strategy with --hf",
        strategy,
        (*STRATEGIES, AUTO),
        do="plan your own step with --module for the others",
    )
    for unsupported in ("save", "timeline"):
        if getattr(arguments, unsupported):
            raise UserError(
                "options", got=f"--hf and --{unsupported}", expected="--trace, --report or --json",
                do="plan your own step with --module to save a plan that runs",
            )  # fmt: skip
    for name, needed in (("kineto", "measured"), ("search_seconds", "search")):
        if getattr(flags, name) != getattr(HfFlags, name) and not getattr(flags, needed):
            got = f"--{name.replace('_', '-')} without --{needed}"
            raise UserError("options", got=got, expected="both", do=f"add --{needed}")
    if flags.cp_comm_type != HfFlags.cp_comm_type and flags.context == 1:
        raise UserError(
            "options", got="--cp-comm-type without --context", expected="both", do="add --context"
        )
    measured_ms = None if arguments.measured is None else _milliseconds(arguments.measured)
    start = time.perf_counter()
    question = flags.question(cluster, gpus)
    searched = None
    if arguments.search:
        from lancet_kernels.predict.search import search

        searched = search(question, arguments.search_seconds)
    result = answer(question) if searched is None else searched.answer
    figures = result.to_json() | ({} if searched is None else {"search": searched.to_json()})
    name = result.best if strategy == AUTO else strategy
    if name not in result.strategies:
        why = result.impossible.get(name, "leave out --search, which did not try it")
        raise UserError("--strategy with --hf", got=name, expected="one that is possible here", do=why)
    chosen = result.strategies[name]
    rows: list[Difference] = []
    if measured_ms is not None:
        from lancet_kernels.predict.measured import differences, trace_terms

        terms = None if arguments.kineto is None else trace_terms(arguments.kineto, measured_ms)
        rows = differences(chosen, measured_ms, terms)
        figures["measured"] = {"step_ms": measured_ms, "terms": [asdict(row) for row in rows]}
    written = _write_files(result, chosen, arguments, searched)
    figures |= {"total_planning_seconds": time.perf_counter() - start, "files": written}
    if arguments.json:
        print(json_text(figures))
        return 0
    print(_text(result) if searched is None else _text_of_search(searched))
    if rows:
        print(_text_of_differences(rows))
    for what, path in written.items():
        print(f"{what} written to {path}")
    if searched is None:
        check_fits(result)
    return 0


def _milliseconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)", text)
    if match is None or not float(match[1]):
        expected = "a time above 0, as 24.7s or 850ms"
        raise UserError("--measured", got=text, expected=expected, do="give the unit, too")
    return float(match[1]) * (1000.0 if match[2] == "s" else 1.0)


def _text_of_differences(rows: list[Difference]) -> str:
    lines = [("term", "predicted ms", "measured ms", "likely")]
    for row in rows:
        measured = "-" if row.measured_ms is None else f"{row.measured_ms:.1f}"
        lines.append((row.term, f"{row.predicted_ms:.1f}", measured, f"{row.likely_ms:+.1f}"))
    legend = "likely: what of the difference the term explains, by how sure its prediction is"
    return f"\n{aligned(lines, right=(1, 2, 3))}\n{legend}"


def _write_files(
    result: Answer, chosen: Simulated, arguments: argparse.Namespace, searched: SearchResult | None
) -> dict[str, str]:
    """Write every requested file. -> kind of file -> path."""
    if arguments.trace:
        from lancet_kernels.schedules.time.timeline import save_trace

        with file_errors(arguments.trace):
            save_trace(chosen.events, arguments.trace)
    if arguments.report:
        from lancet_kernels.predict.report import report

        with file_errors(arguments.report):
            Path(arguments.report).write_text(report(result, searched), encoding="utf-8")
    files = {"trace": arguments.trace, "report": arguments.report}
    return {kind: path for kind, path in files.items() if path}


def _text_of_search(result: SearchResult) -> str:
    lines = [f"{'step ms':>10} {'more':>6} {'GiB':>6} {'binds':>12}  the best layouts that fit"]
    for one in result.best:
        q = one.question
        lines.append(
            f"{one.step_ms:10.1f} {one.step_ms / result.best[0].step_ms - 1:6.1%} {one.peak_memory_gib:6.1f} "
            f"{one.binds:>12}  experts over {q.expert_ranks}, tensors over {q.tensor_ranks}, "
            f"sharding {q.sharding}, {q.microbatch} x {q.accumulate} sequences, recompute "
            f"{q.recompute}, {one.strategy}"
        )
    first, limit = result.best[0], result.answer.memory_limit_gib
    terms = sorted(result.answer.strategies[str(first.strategy)].terms_ms.items(), key=lambda term: -term[1])
    shares = ", ".join(f"{name} {ms / first.step_ms:.0%}" for name, ms in terms if ms > 0.01 * first.step_ms)
    lines += ["", f"The best: {shares}. Memory: {first.peak_memory_gib:.1f} of {limit:.1f} GiB."]
    if excluded := result.memory_excludes:
        lines.append(
            f"Memory binds: {len(excluded)} layouts that do not fit would be faster by a formula; the "
            f"nearest needs {excluded[0].least_gib - limit:.1f} GiB more than there is."
        )
    reasons = Counter(re.sub(r"[ :]*[0-9.]+ (ms|GiB)", "", one.why) for one in result.others)
    lines += ["", f"{len(result.others)} others:"]
    return "\n".join([*lines, *(f"  {count} {why}" for why, count in reasons.most_common())])


def _text(result: Answer) -> str:
    lines = [f"Simulated, nothing was run: {result.question.describe()}", ""]
    lines.append(
        f"{'strategy':16} {'step ms':>10} {'bound':>10} {'tokens/s':>9} {'TFLOP/s':>8} {'GiB':>6}  exposed ms"
    )
    for name in result.strategies:
        one, figures = result.strategies[name], result.figures(name)
        tokens, tflops = figures["tokens_per_s_per_gpu"], figures["tflops_per_gpu"]
        idle = {**one.exposed_ms, "waiting for the host": one.host_ms}
        exposed = ", ".join(f"{kind} {ms:.0f}" for kind, ms in idle.items() if ms >= 0.5) or "nothing"
        lines.append(
            f"{name:16} {one.step_ms:10.1f} {one.lower_bound_ms:10.1f} {tokens:9.0f} "
            f"{tflops:8.1f} {one.peak_memory_gib:6.1f}  {exposed}"
        )
    for why in dict.fromkeys(result.impossible.values()):
        names = ", ".join(name for name, reason in result.impossible.items() if reason == why)
        lines.append(f"{names}: not possible, {why}")
    memory = ", ".join(f"{kind} {size:.1f}" for kind, size in result.strategies[result.best].memory.items())
    fits = "fits" if result.fits(result.best) else "does not fit"
    lines += ["", f"Best: {result.best}, which {fits} into {result.memory_limit_gib:.1f} GiB ({memory})."]
    captured, planned = result.seconds["capture"], result.seconds["plan"]
    lines += [f"Captured in {captured:.1f} s, planned in {planned:.1f} s.", "", "Assumed:"]
    return "\n".join([*lines, *(f"- {text}" for text in result.assumed)])
