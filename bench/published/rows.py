"""Rows of published measurements, each with its prediction and error: one TOML file for each source.

A file has `source`, `commit`, `configuration` and `assumed`, and a table `[[rows]]` for each configuration:
its name, differences from that of the file, and `measured`, of which each value is a row.

One MoE layer alone is predicted as Megatron-LM's performance test measures it: forward, backward, peak
memory. The test passes no `gated_linear_unit`, so the experts have a plain GELU; it is not fused, and routing
weights are multiplied in float32 after it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lancet_kernels import MoELayer
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.graph.costs.costs import KernelCosts
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program import Phase, Program, TensorSpec
from lancet_kernels.predict.answer import Answer, answer
from lancet_kernels.predict.kernels import Kernels
from lancet_kernels.predict.model_step import weights_inside_experts
from lancet_kernels.predict.own_step import fake_ranks, without_contents
from lancet_kernels.predict.question import Question
from lancet_kernels.predict.recomputation import recompute_as
from lancet_kernels.schedules.time.peak_memory import peak_memory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "measurements"
CONFIGS = Path(__file__).parent / "configs"
NAMES = {"forward_ms": ", forward", "backward_ms": ", backward", "peak_memory_gib": ", memory"}
"""The ending of a row's name, by quantity."""
_OF_A_TABLE = ("name", "configuration", "measured", "fitted")


@dataclass(frozen=True)
class Row:
    """One measured value.

    configuration: of the file, with the changes of the row. quantity: "step_ms", "forward_ms",
    "peak_memory_gib", ... strategy: of the order that was measured. fitted: whether constants were fitted on
    it. not_simulated: the reason why the row cannot be simulated; "": it can. why: known causes of the error.
    """

    name: str
    source: str
    commit: str
    configuration: Mapping[str, Any]
    assumed: tuple[str, ...]
    quantity: str
    measured: float
    strategy: str = "none"
    fitted: bool = False
    not_simulated: str = ""
    why: str = ""


def load_rows() -> list[Row]:
    """All rows, fitted ones first, then by file."""
    rows = [row for file in sorted(FOLDER.glob("*.toml")) for row in _of_file(file)]
    return sorted(rows, key=lambda row: not row.fitted)


def _of_file(file: Path) -> list[Row]:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    common = data.get("configuration", {})
    return [
        Row(
            name=row["name"] + NAMES.get(quantity, ""),
            source=data["source"],
            commit=data["commit"],
            configuration={**common, **row.get("configuration", {})},
            assumed=tuple(data.get("assumed", ())),
            quantity=quantity,
            measured=measured,
            # Constants are fitted on times alone.
            fitted=row.get("fitted", False) and quantity != "peak_memory_gib",
            **{key: value for key, value in row.items() if key not in _OF_A_TABLE},
        )
        for row in data["rows"]
        for quantity, measured in row["measured"].items()
    ]


FORWARD_PASSES, BACKWARD_PASSES = 16, 32
"""Bytes per element that the unfused activation moves: gelu 2 read, 2 written; times the weight 2, 4; to
bfloat16 4, 2. Backward: the cast 2, 4; times the weight 4, 4; the weight's gradient 4, 2; the cast 4, 2; gelu
2, 2, 2."""


@lru_cache(maxsize=8)
def layer_program(
    width: int, hidden: int, experts: int, top_k: int, gate: str, tokens: int, ranks: int
) -> Program:
    """Forward and backward of the layer on one of `ranks` ranks."""
    with fake_ranks(ranks):
        with without_contents():
            layer = MoELayer(
                width, hidden, experts, top_k=top_k, gate=gate, capacity_factor=None, activation="gelu"
            ).to(torch.bfloat16)
            x = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        joint = capture(layer, (x,)).joint
        weights_inside_experts(joint)
        recompute_as(joint, "none")
        return program_from_fx(joint, "layer")


def _with_unfused_activation(program: Program) -> Program:
    """The Program with the passes and the temporary tensors of the unfused activation: gelu's result, kept
    for the gradient of the weights, and float32 products, one in the forward, three in the backward."""
    tensors, instructions = dict(program.tensors), []
    for i in program.instructions:
        if i.op.startswith("lancet.expert_activation"):
            forward = i.phase is Phase.FORWARD
            elements = program.tensors[i.outputs[0]].content_bytes // 2
            more = {"gelu": 2 * elements, "product": 4 * elements} if forward else {"products": 12 * elements}
            tensors |= {name: TensorSpec(name, (), bytes=size) for name, size in more.items()}
            i = replace(
                i, bytes=float(elements * (FORWARD_PASSES if forward else BACKWARD_PASSES)),
                inputs=i.inputs if forward else (*i.inputs, "gelu"), outputs=(*i.outputs, *more),
            )  # fmt: skip
        instructions.append(i)
    return replace(program, instructions=tuple(instructions), tensors=tensors)


def predicted_layer(configuration: Mapping[str, Any]) -> dict[str, float]:
    """`forward_ms`, `backward_ms` and `peak_memory_gib` of a row's layer."""
    c = dict(configuration)
    names = ("width", "hidden", "experts", "top_k", "gate", "tokens", "gpus")
    program = layer_program(*(c[name] for name in names))
    cost = KernelCosts(
        load_cluster(c["cluster"]), c["gpus"], c["gpus"], c["dispatch"], c["top_k"],
        c.get("groups", 0), c.get("top_groups", 0),
    )  # fmt: skip
    program, kernels = Kernels(cost.carrier, cost.top_k).of(program)
    program = kernels.with_copies(_with_unfused_activation(program))
    ms = dict.fromkeys(Phase, 0.0)
    for i in program.instructions:
        ms[i.phase] += cost(i, program.tensors)
    return {
        "forward_ms": ms[Phase.FORWARD],
        "backward_ms": ms[Phase.BACKWARD],
        "peak_memory_gib": peak_memory(program) / 2**30,
    }


@dataclass(frozen=True)
class Checked:
    """A row with its prediction. None: not simulated."""

    row: Row
    predicted: float | None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured, as a fraction; for the gain of an overlap, which is a fraction
        itself, the difference."""
        if self.predicted is None:
            return None
        difference = self.predicted - self.row.measured
        return difference if self.row.quantity == "gain" else difference / self.row.measured

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, with `predicted` and `error`."""
        return {**asdict(self.row), "predicted": self.predicted, "error": self.error}


def check(rows: Sequence[Row]) -> list[Checked]:
    """Rows with their predictions."""
    return [Checked(row, None if row.not_simulated else predict(row)) for row in rows]


def predict(row: Row) -> float:
    """The prediction of a row's quantity."""
    if row.configuration["kind"] == "layer":
        return predicted_layer(row.configuration)[row.quantity]
    result = answer_of(row)
    if row.quantity == "gain":
        return 1 - result.strategies[row.strategy].step_ms / result.strategies["none"].step_ms
    if row.quantity == "exchange_ms":
        return result.strategies["none"].exposed_ms["all_to_all"]  # where nothing hides them
    return float(result.figures(row.strategy)[row.quantity])  # type: ignore[arg-type]


def answer_of(row: Row) -> Answer:
    return _answer(question_of(row), tuple(dict.fromkeys(("none", row.strategy))))


_answer = lru_cache(maxsize=32)(answer)


def question_of(row: Row) -> Question:
    layout = {name: value for name, value in row.configuration.items() if name not in ("kind", "model")}
    return Question(str(CONFIGS / f"{row.configuration['model']}.json"), **layout)


def summary(checked: Sequence[Checked]) -> dict[str, dict[str, float]]:
    """Mean, median and worst absolute error of times and of memory, fitted and predicted apart."""
    result = {}
    for fitted in (True, False):
        for what in ("time", "memory"):
            errors = [
                abs(one.error)
                for one in checked
                if one.error is not None
                and one.row.fitted is fitted
                and one.row.quantity != "gain"
                and ("memory" in one.row.quantity) is (what == "memory")
            ]
            if errors:
                name = f"{'fitted' if fitted else 'predicted'} {what}"
                result[name] = {
                    "rows": len(errors),
                    "mean": statistics.fmean(errors),
                    "median": statistics.median(errors),
                    "worst": max(errors),
                }
    return result
