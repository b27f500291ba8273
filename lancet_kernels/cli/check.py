"""`lancet check`: compares a training step on several ranks with the same step on one.

    lancet check ── rank 0 of 1: the whole batch ── reference.pt ── ranks 0 to N - 1 of N: a slice each

Both are jobs of their own, which `make_step` sees: the first has a process group of one rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lancet_kernels.cli.options import positive_float, positive_int
from lancet_kernels.errors import UserError
from lancet_kernels.files import json_text, write_json_atomically
from lancet_kernels.measure.launch import LANCET, Rank, launch, start_ranks, under_launcher

if TYPE_CHECKING:
    from lancet_kernels.measure.step_check import Inputs

RESULT = "result.json"
SUMS = ("module", "ddp", "fsdp", "optimize")


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "check",
        help="compare a training step on several ranks with the same step on one",
        description="Run your training step on one rank, and on several with the same weights and a slice of "
        "the batch each. If the loss or the gradient of a parameter differs, say where that began, on which "
        "rank, and how: a missing sum, a factor, stale values, other routing, swapped experts.",
    )
    command.add_argument(
        "module", metavar="FILE.py:FUNCTION",
        help="a function that returns the module and the batch of all ranks",
    )  # fmt: skip
    command.add_argument("--ranks", type=positive_int, default=2, help="ranks to start (default: 2)")
    command.add_argument(
        "--sums", choices=SUMS, default="module",
        help="what sums gradients over the ranks: the module itself, or what this command puts around it "
        "(default: module)",
    )  # fmt: skip
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    command.add_argument(
        "--timeout", type=positive_float, default=120.0, help="seconds that a rank waits for another one "
        "(default: 120)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    # Only for the ranks that this command starts.
    command.add_argument("--folder", help=argparse.SUPPRESS)
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start both jobs and print the result, or be a rank of one. -> exit code, 1 for a difference."""
    if arguments.folder:
        _run_rank(arguments, Path(arguments.folder))
        return 0
    if under_launcher():
        what, do = "a call that starts its own ranks", "call it without torchrun"
        raise UserError("check", got="a rank of another launcher", expected=what, do=do)
    if arguments.ranks < 2:
        raise UserError("--ranks", got=arguments.ranks, expected="at least 2", do="compare several with one")
    with tempfile.TemporaryDirectory(prefix="lancet-check-") as folder:
        for ranks in (1, arguments.ranks):
            launch(ranks, [*LANCET, *argv, "--folder", folder], device=arguments.device)
        result = json.loads(Path(folder, RESULT).read_text(encoding="utf-8"))
    print(json_text(result) if arguments.json else _text(arguments.module, result))
    return 1 if result["difference"] else 0


def _run_rank(arguments: argparse.Namespace, folder: Path) -> None:
    # Imported here, because most commands do not plan.
    from lancet_kernels.measure.step_check import first_of, on_one_rank, on_this_rank
    from lancet_kernels.ops.comm.groups import group_name, values_of_ranks

    # For make_step, the job of one rank is like the other one.
    rank = start_ranks(arguments.device, arguments.timeout, even_alone=True)
    reference_file = folder / "reference.pt"
    if rank.world == 1:
        model, inputs = _step(arguments.module, "module", rank)
        torch.save((on_one_rank(model, inputs, arguments.ranks), inputs), reference_file)
        return
    model, _ = _step(arguments.module, arguments.sums, rank)
    reference, inputs = torch.load(reference_file, weights_only=False, mmap=True)
    own = on_this_rank(model, pytree.tree_map_only(Tensor, lambda t: t.to(rank.device), inputs), reference)
    by_rank = values_of_ranks(own, group_name(None), "differences")
    if rank.rank == 0:
        first = first_of(by_rank)
        others = {d.place for one in by_rank for d in one.differences} - {first and first[0].place}
        result = {
            "ranks": rank.world, "steps": len(reference.steps), "parameters": own.parameters,
            "loss": own.loss, "loss_on_one_rank": [step.whole.loss for step in reference.steps],
            "loss_of_slices": [mean(run.loss for run in step.slices) for step in reference.steps],
            "of_slices": sorted({name for one in by_rank for name in one.by_slices}),
            "difference": first and {**asdict(first[0]), "ranks": first[1]}, "others": sorted(others),
        }  # fmt: skip
        write_json_atomically(folder / RESULT, result)


def own_step(spec: str, device: torch.device, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """The module and inputs of make_step, on the device."""
    from lancet_kernels.predict.own_step import call_make_step, load_function

    torch.manual_seed(seed)
    model, inputs = call_make_step(spec, load_function(spec), nullcontext())
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
    return model, pytree.tree_map_only(Tensor, lambda t: t.to(device), inputs)


def _step(spec: str, sums: str, rank: Rank) -> tuple[nn.Module, Inputs]:
    """The same, in the wrapper that sums its gradients."""
    from lancet_kernels.layer.data_parallel import ddp, fsdp
    from lancet_kernels.measure.step_check import slice_of
    from lancet_kernels.optimization.optimize import optimize

    model, inputs = own_step(spec, rank.device)
    if sums == "optimize":
        return optimize(model, slice_of(inputs, rank.world, rank.rank)), inputs
    if sums == "module":
        return model, inputs
    return (ddp(model) if sums == "ddp" else fsdp(model)), inputs


def _text(spec: str, result: dict[str, Any]) -> str:
    ranks, steps, parameters = result["ranks"], result["steps"], result["parameters"]
    lines = [f"{spec}: {ranks} ranks beside one, {parameters} parameters, {steps} steps on the same batch"]
    # JSON has no infinity and no NaN.
    figures = [
        ", then ".join("not finite" if x is None else f"{x:.6g}" for x in result[f"loss{of}"])
        for of in ("", "_on_one_rank", "_of_slices")
    ]
    lines.append(f"loss: {figures[0]}; on one rank {figures[1]}, slice by slice {figures[2]}")
    if cut := result["of_slices"]:
        lines.append(
            f"{len(cut)} gradients are those of slice by slice and not of the whole batch: the loss depends "
            "on how it is cut, by a load-balance loss or a capacity of each rank, say"
        )
    first = result["difference"]
    if first is None:
        return "\n".join([*lines, "The same: the loss, and every gradient on every rank."])
    lines.append(
        f"First difference: {first['phase']} of {first['place']} in step {first['step']}: {first['kind']}"
    )
    ranks_of: dict[str, list[str]] = {}
    for rank, what in first["ranks"].items():
        ranks_of.setdefault(what, []).append(rank)
    lines += [f"  rank {', '.join(numbers)}: {what}" for what, numbers in ranks_of.items()]
    if others := result["others"]:
        few = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        lines.append(f"{len(others)} more differ, maybe as a consequence: {few}")
    return "\n".join(lines)
