"""A set-up as plain data: a small model of blocks, a training loop, a strategy; and how one is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, Literal

from lancet_kernels.ops.moe.gates import parse_gate
from lancet_kernels.schedules import MICROBATCHES, STRATEGY_NAMES
from lancet_kernels.schedules.strategies import AUTO, DUPLEX

GATES = {
    "switch": 1, "topk": 2, "topk(renormalize=True)": 2, "hash": 1, "random": 2, "sigmoid": 2, "gshard": 2,
    "batch-prioritized": 2, "expert-choice": 1,
}  # fmt: skip
"""Gate -> experts per token."""
KINDS = ("linear", "attention", "norm", "dropout", "moe", "buffer", "plain")
VARIANTS = {
    "attention": ("fused", "written out"),
    "norm": ("layer", "rms", "batch"),
    "dropout": ("torch", "torch, p = 0", "by token"),
    # Read alone; counted up, and averaged, by the forward.
    "buffer": ("constant", "counted", "averaged"),
    # Where a tensor that is neither parameter nor buffer lies.
    "plain": ("attribute", "list", "dict", "global"),
}
TRAINS = ("w1", "w2", "experts", "router", "none")
CHANGED_BUFFERS = ("counted", "averaged", "batch")
CHECKPOINTS = ("reentrant", "not reentrant", "selective")
SHARDS = ("resharded", "kept", "replicated", "lower precision")
OPTIMIZERS = ("sgd", "adamw", "adagrad")
STEPS = 3


class _Short:
    """Shows only what is not the default, as text that gives the same value again."""

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


@dataclass(frozen=True, repr=False)
class Block(_Short):
    """kind: one of KINDS. variant: one of VARIANTS. checkpoint: one of CHECKPOINTS, or "". frozen: "", "all",
    or "first": its first parameter. same_as: number of an earlier block of this kind, -1: none; what they
    share: "weight", or the whole "module".
    adapter: are weights frozen below adapters of low rank? Of "plain": requires_grad. Of "moe": trains: which
    of its parameters do, one of TRAINS, "": all. balance: is its balance loss part of the loss?
    """

    kind: str = "linear"
    variant: str = ""
    checkpoint: str = ""
    frozen: str = ""
    same_as: int = -1
    shared: str = "weight"
    adapter: bool = False
    requires_grad: bool = False
    trains: str = ""
    gate: str = "switch"
    capacity: float | None = None
    activation: str = "gelu"
    bias: bool = False
    shared_expert: bool = False
    balance: bool = False


@dataclass(frozen=True, repr=False)
class Loop(_Short):
    """How the model is trained for STEPS steps.

    accumulate: two batches in a step: "" one, "each" has its backward, "sum" one backward for both,
    "no_sync": gradients of the first are summed over the ranks with the second's, "microbatches": in one
    call.
    clip: largest norm, 0: not clipped. scaler: "", "on", "overflow": in step 1, on rank 1.
    sizes: sequences in the batch of each step. uneven: behind the first batch, rank 1 has "one less" or
    "none".
    change: what happens to the model before step `change_at`, see `changes`; change_block: to which block;
    one_rank: on rank 1 alone. resume: how the run continues in another module after `change_at` steps: "",
    "state dict", "dcp".
    penalty: is there a part of the loss that reads a parameter outside the module? outer: one that reads the
    logits? input_gradient: do vectors among the inputs require a gradient?
    number: an int among the inputs: "", "same", "other" in the last step.
    """

    optimizer: str = "sgd"
    accumulate: str = ""
    clip: float = 0.0
    scaler: str = ""
    schedule: bool = False
    sizes: tuple[int, ...] = (4, 4, 4)
    uneven: str = ""
    change: str = ""
    change_at: int = 1
    change_block: int = 0
    one_rank: bool = False
    resume: str = ""
    penalty: bool = False
    outer: bool = False
    input_gradient: bool = False
    number: str = ""


@dataclass(frozen=True, repr=False)
class Setup(_Short):
    """tokens: inputs are token ids, embedded, and the loss is a cross entropy; otherwise vectors.
    tied: the head is the embedding. frozen_input: the first layer does not train. returns: what the forward
    returns: "loss", or a "dict" with loss and logits. by_name: how inputs are given. reduce: as for
    `optimize`. under: where `optimize` is called: "no_grad", "inference_mode", or "". padded: are tokens with
    a low id padding for the MoE layers? ranks: of the job. expert_ranks: of them share experts. shard: how
    FSDP holds the parameters, one of SHARDS, "": whole. adapters_only: is all else frozen? measured: are ops
    timed, and plans tried? link: is it emulated?
    """

    blocks: tuple[Block, ...] = ()
    tokens: bool = False
    tied: bool = False
    frozen_input: bool = False
    returns: str = "loss"
    by_name: bool = False
    reduce: str | Literal[False] = "sum"
    under: str = ""
    strategy: str = "lancet"
    loop: Loop = field(default=Loop())
    padded: bool = False
    ranks: int = 2
    expert_ranks: int = 2
    shard: str = ""
    adapters_only: bool = False
    measured: bool = False
    link: bool = False


ON_ONE_RANK = (
    "p", "eval", "skip", "hook", "replace tensor", "change tensor", "replace buffer", "change buffer",
)  # fmt: skip
"""What may happen on one rank without hanging the plain module."""


def changes(blocks: tuple[Block, ...]) -> list[tuple[str, int]]:
    """What may happen to a model between steps, and to which of its blocks."""
    found = [("evaluate", 0), ("reload", 0), ("freeze", 0)] if blocks else [("evaluate", 0), ("reload", 0)]
    for number, block in enumerate(blocks):
        found.append(("eval", number))
        if block.kind != "moe":  # another rank would wait in it
            found += [("skip", number), ("hook", number)]
        found += [("p", number)] * (block.kind == "dropout" and block.variant != "by token")
        found += [("capacity", number)] * (block.kind == "moe" and block.gate != "expert-choice")
        if block.kind == "plain" and not block.requires_grad:
            found += [("replace tensor", number), ("change tensor", number)]
        if block.kind == "buffer":
            found += [("replace buffer", number), ("change buffer", number)]
    return found


def drawn(draw: Random, ranks: int = 2) -> Setup:
    """Any set-up whose model trains on its own."""
    blocks, tokens = _blocks(draw), draw.random() < 0.5
    adapters_only = any(b.adapter for b in blocks) and draw.random() < 0.5
    if adapters_only:
        # Without a gradient of its input, what a reentrant checkpoint recomputes gets none in plain torch.
        blocks = tuple(replace(b, checkpoint="") if b.checkpoint == "reentrant" else b for b in blocks)
    tied = tokens and draw.random() < 0.5
    is_reentrant = any(b.checkpoint == "reentrant" for b in blocks)
    frozen_input = not tied and draw.randrange(8) == 0 and not is_reentrant
    shards = [s for s in SHARDS if s != "lower precision" or not any(b.variant == "batch" for b in blocks)]
    shard = draw.choice(shards) if draw.random() < 0.4 else ""
    loop = _loop(draw, blocks, bool(shard))
    strategy = _strategy(draw, blocks)
    if loop.accumulate == "microbatches" and draw.random() < 0.5:
        strategy = MICROBATCHES
    return Setup(
        blocks,
        tokens,
        tied,
        frozen_input,
        returns=draw.choice(("loss", "dict")),
        by_name=draw.randrange(4) == 0,
        reduce=draw.choice(("sum", "mean")) if shard else draw.choice(("sum", "sum", "mean", "mean", False)),
        under=_rarely(draw, 12, "no_grad", "inference_mode"),
        strategy=strategy,
        loop=loop,
        padded=draw.randrange(3) == 0,
        ranks=ranks,
        expert_ranks=draw.choice([n for n in (1, 2, 4, ranks, ranks) if n <= ranks]),
        shard=shard,
        adapters_only=adapters_only,
        measured=strategy in (AUTO, MICROBATCHES) and draw.randrange(4) == 0,
        link=draw.randrange(6) == 0,
    )


def _strategy(draw: Random, blocks: tuple[Block, ...]) -> str:
    """One that is not refused at once, in most cases."""
    gates = [parse_gate(b.gate).partitionable for b in blocks if b.kind == "moe" and b.shared != "module"]
    copies = gates and all(gates)
    return draw.choice([s for s in STRATEGY_NAMES if copies or s not in DUPLEX or draw.randrange(4) == 0])


def _rarely(draw: Random, one_in: int, *values: Any, otherwise: Any = "") -> Any:
    return draw.choice(values) if draw.randrange(one_in) == 0 else otherwise


def _blocks(draw: Random) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice((*KINDS, "moe", "moe", "linear"))
        earlier = [
            i for i, b in enumerate(blocks) if b.kind == kind and b.shared != "module" and not b.adapter
        ]
        same_as = -1
        if earlier and kind in ("linear", "moe") and draw.random() < 0.5:
            same_as = draw.choice(earlier)
            if draw.random() < 0.4:
                blocks.append(Block(kind, same_as=same_as, shared="module"))
                continue
        options = {"requires_grad": draw.randrange(4) == 0} if kind == "plain" else {}
        if kind == "moe":
            options = _moe(draw, blocks[same_as] if same_as >= 0 else None)
        elif kind != "plain":
            options = {"frozen": _rarely(draw, 6, "all", "first")}
        if kind in ("attention", "moe") and same_as < 0 and draw.randrange(4) == 0:
            options["adapter"] = True
        variant, checkpoint = draw.choice(VARIANTS.get(kind, ("",))), _rarely(draw, 4, *CHECKPOINTS)
        if variant in CHANGED_BUFFERS:
            checkpoint = ""  # torch would change the buffer a second time when it recomputes the block
        blocks.append(Block(kind, variant, checkpoint, same_as=same_as, **options))
    return tuple(blocks)


def _moe(draw: Random, shared: Block | None) -> dict[str, Any]:
    gate = draw.choice(list(GATES))
    return {
        "gate": gate,
        "capacity": 1.0 if gate == "expert-choice" else draw.choice((None, 1.0)),
        "trains": _rarely(draw, 4, *TRAINS),
        "activation": shared.activation if shared else draw.choice(("gelu", "swiglu")),
        "bias": draw.randrange(3) == 0,
        "shared_expert": draw.randrange(3) == 0,
        "balance": draw.randrange(3) == 0,
    }


def _loop(draw: Random, blocks: tuple[Block, ...], sharded: bool) -> Loop:
    possible = changes(blocks)
    names = {name for name, _ in possible}
    own = names - {"evaluate", "reload", "freeze", "eval", "skip", "hook"}
    change = draw.choice(sorted(own if own and draw.random() < 0.7 else names)) if draw.random() < 0.5 else ""
    change_block = draw.choice([block for name, block in possible if name == change]) if change else 0
    resume = _rarely(draw, 6, "state dict", "dcp")
    variants = {b.variant for b in blocks}
    ways = ["each", "no_sync"]
    if not variants & {
        *CHANGED_BUFFERS
    }:  # autograd refuses a backward for what read a buffer before it changed
        ways.append("sum")
    if change != "p" and "torch" not in variants:  # microbatches draw their random numbers in another order
        ways += ["microbatches"] * 2
    accumulate = _rarely(draw, 3, *ways)
    own_backward = accumulate != "microbatches"
    fewer = ["one less"] if variants & {"batch", "averaged"} else ["one less", "none"]
    return Loop(
        optimizer=draw.choice(OPTIMIZERS),
        accumulate=accumulate,
        clip=_rarely(draw, 4, 0.5, otherwise=0.0),
        scaler=_rarely(draw, 6, "on", "overflow") if own_backward else "",
        schedule=draw.randrange(4) == 0,
        sizes=_rarely(draw, 3, (4, 2, 4), (4, 1, 3), (2, 4, 5), otherwise=(4, 4, 4)),
        uneven=_rarely(draw, 4, *fewer),
        change=change,
        change_at=draw.randint(1, STEPS - 1) if change or resume else 1,
        change_block=change_block,
        one_rank=change in ON_ONE_RANK and draw.randrange(4) == 0,
        resume=resume,
        penalty=own_backward and not sharded and draw.randrange(24) == 0,
        outer=own_backward and draw.randrange(4) == 0,
        input_gradient=draw.randrange(6) == 0,
        number=_rarely(draw, 8, "same", "other"),
    )
