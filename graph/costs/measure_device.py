"""Measures the device costs of partitioning: a kernel launch, joining parts, and parts of the ops that plans
cut.

Timed by events on a GPU, and by the CPU time of the computing thread on a CPU (`milliseconds_of`). A part is
measured with its whole op on the same operands, and only their ratio is kept, so that both times have equally
warm caches. Ops that only partitioned graphs have are timed alone, by the bytes they read and write.

Why it matters: cutting a layer of gpt2-bench-moe into 2, 4, 8 parts adds 3, 13, 29 ms on a CPU rank. Measured
shares predict 5, 16, 40 ms, a launch plus 1/k of the whole op 1 ms each (2-core CPU under other load,
2026-11-22). The slots and counts of a part take forty times what their bytes say.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from lancet_kernels.graph.costs.clusters import Points
from lancet_kernels.graph.costs.measure import AnyStrides, timed_on_gpu, unpaced
from lancet_kernels.graph.costs.part_instruction import cut_key, part_instruction
from lancet_kernels.graph.from_fx import facts_of, op_name, tensor_names
from lancet_kernels.graph.ops import facts
from lancet_kernels.graph.program import Instruction, Phase, Program, TensorSpec
from lancet_kernels.graph.rules.rules import IRREGULAR, WHOLE, WINDOW, Form, Forms, Rule
from lancet_kernels.ops.moe.dispatch import merge_rows, part_rows, window_counts

PARTS = (2, 4, 8)
_LARGEST_COPY = {"cuda": 1 << 28, "cpu": 1 << 26}
_SMALLEST_COPY = 1 << 12
_TOKENS, _EXPERTS = (128, 1024, 8192), 8
_LAUNCHES = 32
_REPEATS = 3


def milliseconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The median milliseconds of a few calls, without the first."""
    times = []
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            times.append(timed_on_gpu(call, device)[1])
        else:
            start = time.thread_time()
            call()
            times.append((time.thread_time() - start) * 1e3)
    return statistics.median(times[1:])


def measure_launch(device: torch.device) -> float:
    """Milliseconds of an op on one element."""
    x = torch.zeros(1, device=device)

    def call() -> None:
        for _ in range(_LAUNCHES):
            x.add(1.0)

    return milliseconds_of(call, device) / _LAUNCHES


def measure_copies(device: torch.device) -> Points:
    """(bytes read and written, milliseconds) of concatenating two halves; sizes grow by a factor of four."""
    points, size = [], _SMALLEST_COPY
    while size <= _LARGEST_COPY.get(device.type, _LARGEST_COPY["cpu"]):
        # float32, read and written: eight bytes per element.
        half = torch.zeros(size // 16, device=device)
        points.append((float(size), milliseconds_of(partial(torch.cat, [half, half]), device)))
        size *= 4
    return tuple(points)


def measure_counting(device: torch.device) -> dict[str, Points]:
    """By op that only partitioned graphs have, and that copies no rows: (bytes read and written,
    milliseconds). It is many small kernels, so its bytes alone say too little."""
    part, merge = [], []
    for tokens in _TOKENS:
        expert_TK = torch.arange(tokens, device=device).remainder(_EXPERTS).unsqueeze(1)
        slot_TK = torch.arange(tokens, device=device).div(_EXPERTS, rounding_mode="floor").unsqueeze(1)
        one_part = partial(part_rows, expert_TK, slot_TK, _EXPERTS, tokens)
        row_TK, count_E = one_part()
        two_parts = partial(merge_rows, [expert_TK] * 2, [row_TK] * 2, [count_E] * 2)
        # Experts, slots and rows of one part; experts and rows of two, and the merged ones.
        part.append((3.0 * row_TK.nbytes, milliseconds_of(one_part, device)))
        merge.append((6.0 * row_TK.nbytes, milliseconds_of(two_parts, device)))
    window_ms = milliseconds_of(partial(window_counts, count_E, 0, 2), device)
    window = ((2.0 * count_E.nbytes, window_ms),)
    return {
        "lancet.part_rows": tuple(part),
        "lancet.merge_rows": tuple(merge),
        "lancet.window_counts": window,
    }


@dataclass(frozen=True)
class CutToMeasure:
    """One way to cut an instruction: its node, the numbers of parts, the form of each tensor, its
    `cut_key`."""

    node: str
    parts: tuple[int, ...]
    forms: Forms
    key: str


def cuts_to_measure(program: Program) -> list[CutToMeasure]:
    """All ways in which a plan may cut an op whose parts are measured, each `cut_key` once.

    In the backward, plans cut only experts.
    """
    cuts: dict[str, CutToMeasure] = {}
    for instruction in program.instructions:
        row = facts(instruction.op)
        rule = row.rule if row.parts_are_measured else None
        if rule is None or not (instruction.phase is Phase.FORWARD or rule.in_experts):
            continue
        for forms in _ways(instruction, rule, program.tensors):
            shapes = {t: program.tensors[t].shape for t in forms}
            sizes = [shapes[t][f.dimension] for t, f in forms.items() if f.dimension is not None]
            parts = tuple(k for k in PARTS if all(k <= size for size in sizes))
            if parts:
                key = cut_key(*part_instruction(instruction, program.tensors, forms, 0, parts[0]))
                cuts.setdefault(key, CutToMeasure(instruction.name, parts, forms, key))
    return list(cuts.values())


def _ways(instruction: Instruction, rule: Rule, tensors: Mapping[str, TensorSpec]) -> list[dict[str, Form]]:
    operands = (*instruction.inputs, *instruction.outputs)
    ways = [
        way
        for only_experts in (False, True)
        for way in rule.assignments(instruction, tensors, only_experts=only_experts)
    ]
    return [dict(zip(operands, way, strict=True)) for way in dict.fromkeys(ways)]


def measure_parts(
    module: fx.GraphModule,
    inputs: Sequence[object],
    cuts: Sequence[CutToMeasure],
    device: torch.device,
) -> dict[str, Points]:
    """By key of a cut: (number of parts, time of one part as a fraction of the whole op). The graph runs
    once, with its collectives, so all ranks must call this with the same cuts.

    Args: inputs: one per placeholder of the graph.
    """
    timer = _PartTimer(module, cuts, device)
    with torch.no_grad(), unpaced(inputs):
        timer.run(*inputs)
    return timer.shares


class _PartTimer(AnyStrides):
    """Runs a graph; a node with cuts to measure is also run repeatedly, whole and one part of it."""

    def __init__(self, module: fx.GraphModule, cuts: Sequence[CutToMeasure], device: torch.device) -> None:
        super().__init__(module)
        self.device = device
        self.shares: dict[str, Points] = {}
        self.cuts_of: dict[str, list[CutToMeasure]] = {}
        for cut in cuts:
            self.cuts_of.setdefault(cut.node, []).append(cut)

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        if node.name in self.cuts_of:
            whole_ms = self._milliseconds(node, *self.fetch_args_kwargs_from_env(node))
            for cut in self.cuts_of[node.name]:
                times = [(k, self._milliseconds(node, *self._operands(node, cut, k))) for k in cut.parts]
                # For an op too short to measure, assume that its parts take as long together as the whole.
                self.shares[cut.key] = tuple(
                    (float(k), ms / whole_ms if whole_ms else 1 / k) for k, ms in times
                )
        return result

    def _milliseconds(self, node: fx.Node, args: tuple, kwargs: dict) -> float:
        return milliseconds_of(lambda: node.target(*args, **kwargs), self.device)

    def _operands(self, node: fx.Node, cut: CutToMeasure, parts: int) -> tuple[tuple, dict]:
        return fx.map_arg((node.args, node.kwargs), lambda source: self._operand(node, source, cut, parts))

    def _operand(self, node: fx.Node, source: fx.Node, cut: CutToMeasure, parts: int) -> object:
        value = self.env[source]
        if not isinstance(value, Tensor):
            return value
        form = cut.forms.get(tensor_names(source)[0], WHOLE)
        if (rule := facts_of(node).rule) and rule.in_experts:
            # A part has 1/k of every expert's rows (Lancet, section 3).
            if not value.is_floating_point():
                return window_counts(value, 0, parts)
            if form in (WINDOW, IRREGULAR):
                counts = (self.env[n] for n in node.all_input_nodes)
                count = next(c for c in counts if not c.is_floating_point())
                return value[: int(window_counts(count, 0, parts).sum())]
        if form.dimension is None:
            return value
        part = value.narrow(form.dimension, 0, -(-value.shape[form.dimension] // parts))
        if op_name(node) != "lancet.dispatch" or source is not node.args[1]:
            return part
        # The rows of a part of a batch, numbered from zero: [[5], [-1], [2]] -> [[1], [-1], [0]].
        kept_TK = part >= 0
        return part.masked_scatter(kept_TK, part[kept_TK].argsort().argsort())
