"""A set-up as plain data: a small model of blocks, a training loop, a strategy; and how one is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

from lancet_kernels.ops.moe.gates import parse_gate
from lancet_kernels.schedules.strategies import DUPLEX, STRATEGY_NAMES

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
    Of "plain": requires_grad. Of "moe": trains: which of its parameters do, one of TRAINS, "": all. balance:
    is its balance loss part of the loss?
    """

    kind: str = "linear"
    variant: str = ""
    checkpoint: str = ""
    frozen: str = ""
    same_as: int = -1
    shared: str = "weight"
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

    accumulate: two batches in a step: "" one, "each" has its backward, "sum" one backward for both.
    clip: largest norm, 0: not clipped. scaler: "", "on", "overflow": in step 1, on rank 1.
    sizes: sequences in the batch of each step. uneven: behind the first, rank 1 has one less.
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
    uneven: bool = False
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
    returns: "loss", or a "dict" with loss and logits. by_name: how inputs are given. sums: does `optimize`
    sum gradients over the ranks? under: where `optimize` is called: "no_grad", "inference_mode", or "".
    padded: are tokens with a low id padding for the MoE layers?
    """

    blocks: tuple[Block, ...] = ()
    tokens: bool = False
    tied: bool = False
    frozen_input: bool = False
    returns: str = "loss"
    by_name: bool = False
    sums: bool = True
    under: str = ""
    strategy: str = "lancet"
    loop: Loop = field(default=Loop())
    padded: bool = False


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


def drawn(draw: Random) -> Setup:
    """Any set-up whose model trains on its own."""
    blocks, tokens = _blocks(draw), draw.random() < 0.5
    tied = tokens and draw.random() < 0.5
    # Without a gradient of its input, what a reentrant checkpoint recomputes gets none in plain torch.
    frozen_input = (
        not tied and draw.randrange(8) == 0 and not any(b.checkpoint == "reentrant" for b in blocks)
    )
    return Setup(
        blocks,
        tokens,
        tied,
        frozen_input,
        returns=draw.choice(("loss", "dict")),
        by_name=draw.randrange(4) == 0,
        sums=draw.randrange(8) > 0,
        under=_rarely(draw, 12, "no_grad", "inference_mode"),
        strategy=_strategy(draw, blocks),
        loop=_loop(draw, blocks),
        padded=draw.randrange(3) == 0,
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
        earlier = [i for i, b in enumerate(blocks) if b.kind == kind and b.shared != "module"]
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


def _loop(draw: Random, blocks: tuple[Block, ...]) -> Loop:
    possible = changes(blocks)
    names = {name for name, _ in possible}
    own = names - {"evaluate", "reload", "freeze", "eval", "skip", "hook"}
    change = draw.choice(sorted(own if own and draw.random() < 0.7 else names)) if draw.random() < 0.5 else ""
    change_block = draw.choice([block for name, block in possible if name == change]) if change else 0
    resume = _rarely(draw, 6, "state dict", "dcp")
    # Autograd refuses a backward for what read a buffer before it changed.
    changed = any(b.variant in CHANGED_BUFFERS for b in blocks)
    return Loop(
        optimizer=draw.choice(("sgd", "adamw")),
        accumulate=_rarely(draw, 4, "each", "each" if changed else "sum"),
        clip=_rarely(draw, 4, 0.5, otherwise=0.0),
        scaler=_rarely(draw, 6, "on", "overflow"),
        schedule=draw.randrange(4) == 0,
        sizes=_rarely(draw, 3, (4, 2, 4), (4, 1, 3), (2, 4, 5), otherwise=(4, 4, 4)),
        uneven=draw.randrange(6) == 0,
        change=change,
        change_at=draw.randint(1, STEPS - 1) if change or resume else 1,
        change_block=change_block,
        one_rank=change in ON_ONE_RANK and draw.randrange(4) == 0,
        resume=resume,
        penalty=draw.randrange(24) == 0,
        outer=draw.randrange(4) == 0,
        input_gradient=draw.randrange(6) == 0,
        number=_rarely(draw, 8, "same", "other"),
    )
