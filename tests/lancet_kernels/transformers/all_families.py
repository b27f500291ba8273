"""What becomes of every family of the installed transformers, as a table in Markdown:

    python -m tests.lancet_kernels.transformers.all_families              # all of them, 20 minutes on 2 cores
    python -m tests.lancet_kernels.transformers.all_families mixtral gpt_oss

On two CPU ranks, each with its own batch, beside the unconverted model with all experts on each: loss and
every gradient, converted and by a plan that cuts. A family works, or the line says why not.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from lancet_kernels import UserError, convert, moe_layers
from tests.lancet_kernels.transformers.test_converted_ranks import sum_gradients
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.transformers_families import FLOAT32, FamilyStep, families, tiny_batch, tiny_model
from tests.transformers_models import distance, exported_gradients

BOUND, FLOAT32_BOUND = 1e-9, 1e-4
"""In float64, where only sums are in another order; in float32, in which some models compute in any case."""


def converted(family: str, planned: bool) -> str:
    """-> "" if loss and gradients are those of the original; else why not. Collective."""
    step = FamilyStep(tiny_model(family))
    original = copy.deepcopy(step)
    report = convert(step)
    if report.left_alone or not report.converted:
        return next(iter(report.left_alone.values()), "no experts")
    ids = tiny_batch(dist.get_rank() if dist.is_initialized() else 0)
    own = optimized(step, (ids,)) if planned else step
    loss, theirs = own(ids), original(ids)
    loss.backward()
    theirs.backward()
    if not planned and dist.is_initialized():
        sum_gradients(step)
    ours = exported_gradients(step)
    differences = {"loss": distance(loss, theirs)}
    largest = max(float(p.grad.abs().max()) for p in original.parameters() if p.grad is not None)
    for name, parameter in original.named_parameters():
        if parameter.grad is not None:
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
            difference = float((ours[name] - parameter.grad).abs().max())
            differences[name] = difference / max(float(parameter.grad.abs().max()), 1e-4 * largest)
    worst = max(differences, key=differences.__getitem__)
    bound = FLOAT32_BOUND if planned or family in FLOAT32 else BOUND
    return "" if differences[worst] < bound else f"{worst} differs by {differences[worst]:.1e}"


def tried(check: Callable[..., str], *arguments: object) -> str:
    """What a check says, or the first line of its error."""
    try:
        return check(*arguments)
    except UserError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]


def one_family(family: str) -> tuple[str, str, str]:
    """-> converted, planned, activation."""
    torch.manual_seed(0)
    why = tried(converted, family, False)
    if why:
        return why, "", ""
    model = tiny_model(family)
    convert(model)
    return "", tried(converted, family, True), moe_layers(model)[0].activation.partition("(")[0]


def main(chosen: list[str]) -> int:
    # Workers import what they run, which is not in `__main__` there.
    from tests.lancet_kernels.transformers import all_families

    pool, works = RankPool(), 0
    print("| family | converted | planned | activation |", "|---|---|---|---|", sep="\n")
    for family in chosen:
        try:
            results = pool.run(all_families.one_family, family, timeout_s=300)
        except Exception as error:
            results = [(str(error).splitlines()[-1], "", "")]
        why, planned, activation = results[0]
        works += not why and not planned
        cells = (why, "", "") if why else ("yes", planned or "yes", activation)
        print(f"| {family} | {' | '.join(cells)} |", flush=True)
    print(f"\n{works} of {len(chosen)} work.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or [*families()]))
