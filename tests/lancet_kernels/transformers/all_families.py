"""What becomes of every family of the installed transformers, which `docs/reference/families.md` shows:

    python -m tests.lancet_kernels.transformers.all_families              # all of them, an hour on 2 cores
    python -m tests.lancet_kernels.transformers.all_families mixtral gpt_oss --only "plan --hf"

On two CPU ranks, each with its own batch, beside the unconverted model with all experts on each: loss and
every gradient, converted, by a plan that cuts, and under transformers' expert parallelism with FSDP. What
works is "", or `NOT_CUT`; else the line says why not.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import UserError, convert, moe_layers
from lancet_kernels.predict.answer import Captured
from lancet_kernels.predict.question import Question
from tests.lancet_kernels.transformers.test_converted_ranks import sum_gradients
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.transformers_families import FLOAT32, FamilyStep, families, tiny_batch, tiny_model
from tests.transformers_models import distance, exported_gradients

RESULTS = Path(__file__).parents[3] / "bench/results/transformers-families.json"
BOUND, FLOAT32_BOUND = 1e-9, 1e-4
"""In float64, where only sums are in another order; in float32, in which some models compute in any case."""
NOT_CUT = "not cut"
"""A plan whose loss and gradients are right, and which cuts no part of the step."""
WAYS = ("converted", "optimize", "expert parallel", "plan --hf")


def converted(family: str, planned: bool) -> str:
    """-> "" if loss and gradients are those of the original, `NOT_CUT` if they are, by a plan that cuts
    nothing; else why not. Collective."""
    step = FamilyStep(tiny_model(family))
    original = copy.deepcopy(step)
    report = convert(step)
    if report.left_alone or not report.converted:
        return next(iter(report.left_alone.values()), "no experts")
    batches = [tiny_batch(_rank())]
    optimized_step = optimized(step, (batches[0],)) if planned else None
    if planned:  # the second batch of a plan
        batches.append(tiny_batch(2 + _rank()))
    for ids in batches:
        step.zero_grad()
        loss = (optimized_step or step)(ids)
        loss.backward()
    if optimized_step is not None and optimized_step.fallbacks:
        return f"runs without its plan: {next(iter(optimized_step.fallbacks))}"
    theirs = original(batches[-1])
    theirs.backward()
    if not planned and dist.is_initialized():
        sum_gradients(step)
    bound = FLOAT32_BOUND if planned or family in FLOAT32 else BOUND
    different = differences(loss, exported_gradients(step), theirs, original, bound, mean=False)
    uncut = optimized_step is not None and not optimized_step.plan.ranges
    return different or (NOT_CUT if uncut else "")


def expert_parallel(family: str) -> str:
    """The same for transformers' expert parallelism, in float32: torch 2.13 divides float64 gradients of
    experts that one rank has alone twice."""
    from tests.lancet_kernels.transformers.test_transformers_ep import loaded

    model = tiny_model(family, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if not _rank():
            model.save_pretrained(folders[0])
        dist.barrier()
        sizes = {"fsdp_size": 2, "ep_size": 2}
        own = loaded(folders[0], "lancet", sizes, type(model), dtype=torch.float32)
        dist.barrier()
    original, ids = FamilyStep(model), tiny_batch(_rank())
    loss, theirs = FamilyStep(own.eval())(ids), original(ids)
    loss.backward()
    theirs.backward()
    gradients = {
        f"model.{name}": p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in own.named_parameters()
        if p.grad is not None
    }
    return differences(loss, gradients, theirs, original, FLOAT32_BOUND, mean=True)


def differences(
    loss: Tensor, gradients: dict[str, Tensor], theirs: Tensor, original: nn.Module, bound: float, mean: bool
) -> str:
    """-> the largest difference, if it is one. Sums the original's gradients over the ranks."""
    worst, name = distance(loss, theirs), "loss"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    largest = max(float(p.grad.abs().max()) for p in original.parameters() if p.grad is not None)
    for own, parameter in original.named_parameters():
        if parameter.grad is not None:
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
            expected = parameter.grad / ranks if mean else parameter.grad
            if own not in gradients:
                return f"{own} has no gradient"
            difference = float((gradients[own] - expected).abs().max())
            difference /= max(float(expected.abs().max()), 1e-4 * largest)
            if not difference <= worst:
                worst, name = difference, own
    return "" if worst < bound else f"{name} differs by {worst:.1e}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def plan_hf(family: str) -> str:
    """-> "" if `lancet plan --hf` takes the family's config.json; else its line."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(family).config.save_pretrained(folder)
        question = Question(folder, "dgx-h100", 8, 8, sequence=64)
        return "" if Captured.of(question).microbatches[-1].program.instructions else "no step"


def tried(check: Callable[..., str], *arguments: object) -> str:
    """What a check says, or the first line of its error."""
    try:
        return check(*arguments)
    except UserError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]


def in_process(family: str, way: str) -> str:
    """One of `WAYS`, on the ranks that call it."""
    torch.manual_seed(0)
    if way == "expert parallel":
        return tried(expert_parallel, family)
    return tried(converted, family, way == "optimize")


def activation(family: str) -> str:
    """As the op of the experts knows it."""
    model = tiny_model(family)
    convert(model)
    return moe_layers(model)[0].activation.partition("(")[0]


def one_family(pool: RankPool, family: str, ways: Sequence[str] = WAYS) -> dict[str, str]:
    """-> by way, "" or why not; the activation."""
    # Workers import what they run, which is not in `__main__` there.
    from tests.lancet_kernels.transformers import all_families

    results: dict[str, str] = {}
    for way in ways:
        if way == "plan --hf":
            results[way] = tried(plan_hf, family)
        elif way != "optimize" or not results.get("converted"):
            try:
                of_ranks = pool.run(
                    all_families.in_process, family, way, timeout_s=900, collective_timeout_s=600
                )
                results[way] = next(filter(None, of_ranks), "")
            except Exception as error:
                results[way] = str(error).splitlines()[-1]
    return results | ({"activation": activation(family)} if results.get("converted") == "" else {})


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=[*families()])
    parser.add_argument("--only", action="append", choices=WAYS)
    options = parser.parse_args()
    saved = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"families": {}}
    saved |= {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    pool = RankPool()
    for family in options.families:
        results = one_family(pool, family, options.only or WAYS)
        print(family, results, flush=True)
        saved["families"][family] = saved["families"].get(family, {}) | results
        saved["families"] = dict(sorted(saved["families"].items()))
        RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
