"""A fused MoE layer on several ranks, in many uneven steps: one JSON line, exit code 1 if anything is wrong.

    torchrun --standalone --nproc-per-node 8 -m bench.gpu.several_ranks cuda       a GPU for each rank, NVLink
    torchrun --standalone --nproc-per-node 2 -m bench.gpu.several_ranks one-gpu    their kernels take turns
    TRITON_INTERPRET=1 torchrun --standalone --nproc-per-node 2 -m bench.gpu.several_ranks cpu

Every rank has another number of tokens in every step, sometimes none, and sometimes a rank comes late. Every
rank can generate the tokens of all others, and so compares with the whole layer on one device: its outputs,
its tokens' gradients, and the gradients of its experts.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.steps import agreement
from lancet_kernels import MoELayer

LATE_EVERY, LATE_S = 7, 0.02
TIMEOUT_S = 60.0


class Sizes(NamedTuple):
    """The layer, and how many steps. tokens: the most that a rank has in a step."""

    tokens: int
    width: int
    hidden: int
    experts_each: int
    choices: int
    steps: int


SIZES = {
    "cuda": Sizes(8192, 2048, 768, 16, 8, steps=1000),
    "one-gpu": Sizes(512, 256, 256, 4, 2, steps=20),
    "cpu": Sizes(6, 16, 16, 1, 2, steps=2),
}


def main(kind: str) -> int:
    device = torch.device("cpu")
    if kind != "cpu":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        device = torch.device("cuda", 0 if kind == "one-gpu" else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # NCCL takes one rank on each GPU.
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=5 * TIMEOUT_S))
    result = run(SIZES[kind], device)
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(result), flush=True)
    return 0 if result["right"] else 1


def tokens_of(sizes: Sizes, step: int, rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """x and dy of a rank in a step, the same on all ranks. One of 20 steps is without tokens."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    most = 0 if (step + rank) % 20 == 1 else sizes.tokens
    number = min(most, int(torch.randint(1, sizes.tokens + 1, (), generator=generator)))
    x, dy = (torch.randn(number, sizes.width, generator=generator) for _ in range(2))
    return x.to(like), dy.to(like)


def one_pass(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """-> y and the gradient of x; those of the parameters are in the layer."""
    y = layer(x.requires_grad_())
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def run(sizes: Sizes, device: torch.device) -> dict:
    """Collective. -> the same on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    like = torch.empty(0, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, device=device)

    def make(**options: Any) -> MoELayer:
        torch.manual_seed(0)
        options |= {"activation": "swiglu", "gate": "topk", "capacity_factor": None, "top_k": sizes.choices}
        experts = world * sizes.experts_each
        return MoELayer(sizes.width, sizes.hidden, experts, device=device, dtype=like.dtype, **options)

    whole = make(groups=dist.new_subgroups(group_size=1)[0])
    fused = make(backend="fused", timeout=TIMEOUT_S, max_tokens=sizes.tokens)
    here = slice(rank * sizes.experts_each, (rank + 1) * sizes.experts_each)
    with torch.no_grad():
        for name, parameter in fused.named_parameters():
            source = whole.get_parameter(name)
            parameter.copy_(source if parameter.shape == source.shape else source[here])
    wrong = []
    for step in range(sizes.steps):
        if step % LATE_EVERY == LATE_EVERY - 1 and rank == step % world:
            time.sleep(LATE_S)
        fused.zero_grad(set_to_none=False)
        y, dx = one_pass(fused, *tokens_of(sizes, step, rank, like))
        if step % 10 == 0 or sizes.steps < 100:
            whole.zero_grad(set_to_none=False)
            expected = [one_pass(whole, *tokens_of(sizes, step, r, like)) for r in range(world)][rank]
            right: dict[str, Any] = dict(zip(("y", "dx"), expected, strict=True))
            own: dict[str, Any] = {"y": y, "dx": dx, "w1": fused.w1.grad, "w2": fused.w2.grad}
            for name in ("w1", "w2"):
                right[name] = whole.get_parameter(name).grad[here]  # type: ignore[index]
            if not (outcome := agreement(own, right, like.dtype))["right"]:
                wrong.append({"rank": rank, "step": step, **outcome})
    by_rank: list[list[dict]] = [[]] * world
    dist.all_gather_object(by_rank, wrong)
    wrong = list(itertools.chain(*by_rank))
    return {"right": not wrong, "wrong": wrong, "ranks": world, "steps": sizes.steps}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
