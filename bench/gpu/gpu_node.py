"""An MoE layer on the GPUs of one machine: right for a thousand uneven steps, and what it exposes. One JSON.

    bench/gpu/gpu_node.sh       all GPUs of this machine, 2 to 8
    torchrun --standalone --nproc-per-node 2 -m bench.gpu.gpu_node --device cpu --out node.json    a dry run

Correctness: steps of forward and backward with `MoELayer(backend="fused")`, dropless. Every rank has another
number of tokens in every step, sometimes none, and now and then a rank comes late. All ranks can make the
tokens of all others again (`tokens_of`), so each compares with the whole layer on one device, without any
communication: its outputs, its tokens' gradients, and the gradients of its experts.

Exposed communication = time of a step - time of a step that sends nothing, of a layer with as many experts as
are here and the same rows, same kernels; beside it the same for backend="torch". Of all ranks the slowest
counts in each round. On CPUs (dry run) and where ranks share a GPU these times say nothing, and are labelled.

--device cpu: gloo, and Triton's interpreter. --device one-gpu: all ranks on the first GPU, over torch's
symmetric memory with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; their kernels take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# More than rounding of a sum in bfloat16, relative to the largest value.
ALLOWED = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
LATE_EVERY, LATE_S = 7, 0.02
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Node:
    """The layer, and how much is done with it. tokens: the most that a rank has in a step."""

    tokens: int = 8192
    width: int = 2048
    hidden: int = 768
    experts_each: int = 16
    choices: int = 8
    steps: int = 1000
    check_every: int = 10
    rounds: int = 30


TINY = Node(tokens=6, width=16, hidden=16, experts_each=1, choices=2, steps=2, check_every=1, rounds=1)
# Of what several ranks on one GPU can do in a minute.
SHARED = Node(tokens=512, width=256, hidden=256, experts_each=4, choices=2, steps=20, check_every=1, rounds=3)
LABELS = {
    "cuda": "measured",
    "cpu": "dry run: interpreter, no figures",
    "one-gpu": "ranks share a GPU: no figures",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=list(LABELS), default="cuda")
    parser.add_argument("--steps", type=int, help="other than 1,000; a dry run has 2")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that rank 0 writes")
    options = parser.parse_args(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world < 2:
        print(
            "gpu_node: one rank; start it by bench/gpu/gpu_node.sh or torchrun, with 2 or more",
            file=sys.stderr,
        )
        return 2
    if options.device == "cpu":
        # Before anything imports Triton.
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print(f"gpu_node: no CUDA device that torch {torch.__version__} can use", file=sys.stderr)
        return 2
    if options.device == "one-gpu":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = _device(options.device)
    node = {"cuda": Node(), "cpu": TINY, "one-gpu": SHARED}[options.device]
    # NCCL takes one rank on each GPU.
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=5 * TIMEOUT_S))
    try:
        found = measure(node, options.steps or node.steps, device, LABELS[options.device])
    finally:
        dist.destroy_process_group()
    if rank == 0:
        _write(options.out, found)
    return 0 if found["correctness"]["wrong"] == [] else 1


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    torch.cuda.set_device(device)
    return device


def tokens_of(node: Node, step: int, rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """x and dy of a rank in a step, the same wherever they are made. Of 20 steps one is without tokens."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    number = int(torch.randint(1, node.tokens + 1, (), generator=generator))
    if (step + rank) % 20 == 1:
        number = 0
    x, dy = (torch.randn(number, node.width, generator=generator) for _ in range(2))
    return x.to(like), dy.to(like)


def one_pass(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """-> y and the gradient of x; those of the parameters are in the layer."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def largest_difference(got: Tensor, wanted: Tensor) -> float:
    """Relative to the largest value; infinity for what is not finite, so that it is never allowed."""
    if wanted.numel() == 0:
        return 0.0
    off = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-6)
    return float(off) if off.isfinite() else float("inf")


def layers_of(node: Node, device: torch.device, dtype: torch.dtype):
    """-> the fused layer of this rank, the whole layer on one device, and one that sends nothing."""
    from lancet_kernels import MoELayer

    world, rank = dist.get_world_size(), dist.get_rank()
    alone, _ = dist.new_subgroups(group_size=1)
    common: dict[str, Any] = {
        "d_model": node.width, "d_ff": node.hidden, "activation": "swiglu",
        "top_k": node.choices, "gate": "topk", "capacity_factor": None, "device": device, "dtype": dtype,
    }  # fmt: skip
    fused_too: dict[str, Any] = common | {"backend": "fused", "timeout": TIMEOUT_S, "max_tokens": node.tokens}
    torch.manual_seed(0)
    whole = MoELayer(num_experts=world * node.experts_each, groups=alone, **common)
    fused = MoELayer(num_experts=world * node.experts_each, **fused_too)
    here = slice(rank * node.experts_each, (rank + 1) * node.experts_each)
    with torch.no_grad():
        assert fused.router is not None
        assert whole.router is not None
        fused.router.copy_(whole.router)
        fused.w1.copy_(whole.w1[here])
        fused.w2.copy_(whole.w2[here])
    # Of fewer experts than choices a token cannot choose; then it has fewer rows, which the report says.
    choices = min(node.choices, node.experts_each)
    without = MoELayer(num_experts=node.experts_each, groups=alone, **fused_too | {"top_k": choices})
    return fused, whole, without


def check_step(node: Node, step: int, fused, whole, got: tuple[Tensor, Tensor], like: Tensor) -> float:
    """How far y, dx, dw1 and dw2 of a step are from those of the whole layer."""
    rank, here = dist.get_rank(), fused.local_experts
    whole.zero_grad(set_to_none=True)
    expected = [one_pass(whole, *tokens_of(node, step, r, like)) for r in range(dist.get_world_size())]
    pairs = list(zip(got, expected[rank], strict=True))
    for name in ("w1", "w2"):
        mine, theirs = getattr(fused, name), getattr(whole, name)[rank * here : (rank + 1) * here]
        grad = getattr(whole, name).grad
        wanted = torch.zeros_like(theirs) if grad is None else grad[rank * here : (rank + 1) * here]
        pairs.append((torch.zeros_like(mine) if mine.grad is None else mine.grad, wanted))
    return max(largest_difference(*pair) for pair in pairs)


def measure(node: Node, steps: int, device: torch.device, label: str) -> dict:
    """Collective. -> what is written, the same on every rank."""
    from bench.gpu.gpu_report import conditions
    from lancet_kernels.measuring.timing import Clock

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    like = torch.empty(0, dtype=dtype, device=device)
    fused, whole, without = layers_of(node, device, dtype)
    rank, world = dist.get_rank(), dist.get_world_size()
    worst, wrong, checked = 0.0, [], 0
    begin = time.monotonic()
    for step in range(steps):
        if step % LATE_EVERY == LATE_EVERY - 1 and rank == step % world:
            time.sleep(LATE_S)
        fused.zero_grad(set_to_none=True)
        got = one_pass(fused, *tokens_of(node, step, rank, like))
        if step % node.check_every == 0:
            off = check_step(node, step, fused, whole, got, like)
            checked, worst = checked + 1, max(worst, off)
            if not off <= ALLOWED[dtype]:
                wrong.append({"rank": rank, "step": step, "difference": off})
    took = time.monotonic() - begin
    ms, absent = times(node, {"fused": fused, "nothing sent": without}, Clock(device), like)
    found: list[dict] = [{}] * world
    dist.all_gather_object(found, {"worst": worst, "wrong": wrong})
    return {
        **conditions(label, device),
        "figure": "MoE layer on the GPUs of one machine",
        "ranks": world,
        "sizes": vars(node),
        "correctness": {
            "steps": steps,
            "checked": checked,
            "seconds": took,
            "largest_difference": max(f["worst"] for f in found),
            "difference_allowed": ALLOWED[dtype],
            "wrong": [w for f in found for w in f["wrong"]],
        },
        "choices_where_nothing_is_sent": without.top_k,
        **ms,
        "absent": absent,
    }


def times(node: Node, layers: dict, clock, like: Tensor) -> tuple[dict, dict[str, str]]:
    """ms of a step by layer, of all ranks the slowest of each round; exposed ms; and what cannot be had."""
    from bench.gpu.gpu_report import spread
    from lancet_kernels.measuring.timing import in_turn

    absent = {}
    if dist.get_backend() == "nccl":
        from lancet_kernels import MoELayer

        fused = layers["fused"]
        torch_layer = MoELayer(
            node.width, node.hidden, fused.num_experts, top_k=node.choices, gate="topk", capacity_factor=None,
            activation="swiglu", device=like.device, dtype=like.dtype,
        )  # fmt: skip
        torch_layer.load_state_dict(fused.state_dict())
        layers = layers | {"torch": torch_layer}
    else:
        absent["torch"] = "ranks that do not have a GPU each: no NCCL"
    x, dy = (torch.randn(node.tokens, node.width).to(like) for _ in range(2))

    def slowest_ms(name: str) -> float:
        layers[name].zero_grad(set_to_none=True)
        dist.barrier()
        elapsed = torch.tensor([clock.once(lambda: one_pass(layers[name], x, dy))])
        slowest = elapsed.to(like.device if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    taken = in_turn(layers, slowest_ms, node.rounds, warmup=0 if like.device.type == "cpu" else 3)
    rest = taken["nothing sent"]
    exposed = {
        name: spread([a - b for a, b in zip(values, rest, strict=True)])
        for name, values in taken.items()
        if values is not rest
    }
    return {"ms": {name: spread(values) for name, values in taken.items()}, "exposed_ms": exposed}, absent


def _write(path: Path, found: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    correct = found["correctness"]
    print(
        f"{found['label']}; {found['ranks']} ranks, {correct['steps']} steps, {correct['checked']} checked: "
        f"{len(correct['wrong'])} wrong, largest difference {correct['largest_difference']:.2g} "
        f"(allowed {correct['difference_allowed']:g})"
    )
    if found["label"] == LABELS["cuda"]:
        for name, exposed in found["exposed_ms"].items():
            print(f"{name}: {found['ms'][name]['median']:.3f} ms a step, {exposed['median']:.3f} ms exposed")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
