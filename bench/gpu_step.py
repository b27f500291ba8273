"""A step of gpt2-s-moe over a paced (emulated) wire on virtual PEs: none, streams, fused.

Forward and backward of the model from the embedded tokens to the loss, as in Lancet's section 7: 12 blocks,
every second one with experts on all PEs. Dense work is plain torch, each PE's on its stream. Not in it: the
embedding's look-up, the all-reduce of dense gradients, the optimizer, which are the same whatever hides what.
Tokens are routed by a fixed balanced choice, so that every way sends the same rows; what a choice weighs
comes from the router and has its gradient.

The backward passes of dense linear layers give dX alone and leave dW for later (Lancet's section 4):

    none      at once, one after the other
    streams   beside the all-to-all of the next MoE backward, in torch on the PE's first stream
    fused     in the launch of the next MoE backward, as independent GEMMs

The head's dW is computed where it arises: it is larger than all that a layer can hide.

A step of each PE is captured as a CUDA graph, so that what is measured is the device; where that fails, PEs
are launched piece by piece in turns, and the figure says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from gpu_clock import Clock
from gpu_overlap import FusedLayer
from gpu_paced import FAST, Taken, figure
from gpu_sizes import Sizes, normal
from gpu_wire import JITTED, WAYS, Pe, Traffic, pace, played, rate_for
from held_back import staged
from torch import Tensor, nn
from virtual_pes import VirtualPes, rehearsal

from lancet_kernels.kernels.overlap import moe_backward, moe_forward
from lancet_kernels.kernels.overlap_data import DenseGemm, ExpertGradients
from lancet_kernels.training.models import Block, ModelConfig

# Of the vocabulary, so that rows of logits are aligned.
VOCAB_MULTIPLE = 64
# Of gradients between the ways, relative to the largest value: sums in bf16 in another order.
DIFFERENCE_ALLOWED = 0.1
FROM_THE_HOST = "from the host"
# A weight gradient to be computed, dW [N, K] = dy^T x: whose, dy [T, N], x [T, K].
Later = tuple[tuple, Tensor, Tensor]


class _LaterLinear(torch.autograd.Function):
    """y = x @ weight^T + bias, whose backward leaves dW to a launch with a gap to fill."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, key: tuple, later: list[Later]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.key, ctx.later = key, later
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dy_TN = dy.reshape(-1, dy.shape[-1])
        x_TK = x.detach().reshape(-1, x.shape[-1])
        ctx.later.append((ctx.key, dy_TN.contiguous(), x_TK.contiguous()))
        return dy @ weight, None, dy_TN.sum(0), None, None


class Segment(nn.Module):
    """What a PE computes between two MoE layers: the rest of one block, a dense one, the start of the next.

    (x, y) [B, S, D], x + y being the result of the MoE block before -> x, the input of the next experts
    [T, D], the weight of each choice [T, K]; in the last segment the loss.
    """

    def __init__(self, blocks: list[Block], router: nn.Parameter | None, head: nn.Module | None) -> None:
        super().__init__()
        self.blocks, self.router, self.head = nn.ModuleList(blocks), router, head
        self.later: list[Later] = []
        for name, linear in self.blocks.named_modules():
            if isinstance(linear, nn.Linear):
                linear.weight.requires_grad_(False)
                linear.forward = partial(self._linear, name, linear)

    def _linear(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        return _LaterLinear.apply(x, linear.weight, linear.bias, (name, "weight"), self.later)

    def forward(self, x: Tensor, y: Tensor, expert_TK: Tensor, target_T: Tensor) -> tuple[Tensor, ...]:
        x = x + y
        if self.head is not None:
            for block in self.blocks:
                x, _ = block(x, None)
            logits = self.head(x).view(target_T.shape[0], -1)
            return (nn.functional.cross_entropy(logits, target_T),)
        *dense, last = self.blocks
        for block in dense:
            x, _ = block(x, None)
        x = x + last.attention(last.norm1(x))
        h = last.norm2(x).reshape(-1, x.shape[-1])
        probability_TE = (h.float() @ self.router.float().t()).softmax(-1)
        return x, h, probability_TE.gather(1, expert_TK)


def _weight_gradients(later: list[Later], into: dict[tuple, Tensor]) -> None:
    """Compute all that was left for later."""
    with torch.no_grad():
        into |= {key: dy.t() @ x for key, dy, x in later}
    later.clear()


@dataclass
class _Passed:
    """A segment's forward, for its backward; `moe` is the pass of the experts behind it."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    moe: object = None
    routing: object = None


class Step:
    """The model on W virtual PEs.

    Args: model: its shape. sizes: of an MoE layer, in all; T tokens of them on each PE.
    """

    def __init__(
        self, model: ModelConfig, sizes: Sizes, world: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.sizes, self.world, self.device, self.dtype = model, sizes, world, device, dtype
        self.virtual = VirtualPes(world, device)
        self.pes = [Pe(self.virtual, rank) for rank in range(world)]
        self.layers = [
            FusedLayer(sizes, world, device, dtype, pes=self.virtual, spare_programs=1, name=f"layer{i}.")
            for i in range(model.layers // 2)
        ]
        self.traffic = [Traffic(layer, self.pes) for layer in self.layers]
        self.bytes_of_a_step = 2 * sum(traffic.bytes_of_a_pass for traffic in self.traffic)
        self.tokens = sizes.tokens // world
        batch = self.tokens // model.sequence
        shape = (batch, model.sequence, model.width)
        self.x = [normal(*shape, device=device, dtype=dtype, seed=rank) for rank in range(world)]
        self.vocab = -(-model.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        generator = torch.Generator(device).manual_seed(1)
        self.target = [
            torch.randint(model.vocab, (self.tokens,), device=device, generator=generator)
            for _ in range(world)
        ]
        self.segments = [self._segments() for _ in range(world)]
        self.loss: list[Tensor] = [torch.empty(())] * world
        self.gradients: list[dict[tuple, Tensor]] = [{} for _ in range(world)]

    def start_afresh(self) -> None:
        """Everything made anew, exchanges above all."""
        self.__init__(self.model, self.sizes, self.world, self.device, self.dtype)

    def _segments(self) -> list[Segment]:
        """Of one PE. The parameters are equal on all, but not the same tensors.

        What autograd accumulates into a tensor that two PEs use, it would do on the stream of one of them.
        """
        torch.manual_seed(0)
        model, made, blocks = self.model, [], []
        place = {"device": self.device, "dtype": self.dtype}
        for i in range(model.layers):
            blocks.append(Block(model, False, None).to(**place))
            if i % 2:
                # Its feed-forward are the experts.
                blocks[-1].feed_forward = None
                router = nn.Parameter(torch.randn(self.sizes.experts, model.width, **place) * 0.02)
                made.append(Segment(blocks, router, None))
                blocks = []
        head = nn.Sequential(nn.LayerNorm(model.width), nn.Linear(model.width, self.vocab, bias=False))
        return [*made, Segment(blocks, None, head.to(**place))]

    def play(self, way: str, rank: int) -> Iterator[None]:
        """A step of one PE, in pieces that each wait for other PEs at most once."""
        segments = self.segments[rank]
        inputs, passed = (self.x[rank], torch.zeros_like(self.x[rank])), []
        for number, segment in enumerate(segments):
            inputs = tuple(t.detach().requires_grad_() for t in inputs)
            outputs = segment(*inputs, self.layers[0].routings[rank].expert, self.target[rank])
            passed.append(_Passed(inputs, outputs))
            if segment.head is None:
                y = self._experts_forward(way, rank, number, passed[-1])
                inputs = outputs[0], y.view_as(outputs[0])
                yield
        self.loss[rank] = outputs[0].detach()
        kept = self.gradients[rank] = {}
        gradients: tuple[Tensor | None, ...] = (None,)
        later: list[Later] = []
        for number, segment, made in reversed(list(zip(range(len(segments)), segments, passed, strict=True))):
            if segment.head is None:
                moe = self._experts_backward(way, rank, number, made, gradients[1], later)
                kept |= {(number, "w1"): moe.dw1, (number, "w2"): moe.dw2}
                after = moe.dx, moe.dweight
                gradients = (
                    gradients[0],
                    *(t.view_as(o) for t, o in zip(after, made.outputs[1:], strict=True)),
                )
                yield
            own = {name: p for name, p in segment.named_parameters() if p.requires_grad}
            found = torch.autograd.grad(made.outputs, [*made.inputs, *own.values()], gradients)
            gradients = found[:2]
            kept |= {(number, name): d for name, d in zip(own, found[2:], strict=True)}
            later += [((number, *key), dy, x) for key, dy, x in segment.later]
            segment.later.clear()
            if way == "none":
                _weight_gradients(later, kept)
        _weight_gradients(later, kept)
        kept["x",] = gradients[0]

    def _experts_forward(self, way: str, rank: int, number: int, made: _Passed) -> Tensor:
        layer, pe = self.layers[number], self.pes[rank]
        _, h, weight = (t.detach() for t in made.outputs)
        made.routing = replace(layer.routings[rank], weight=weight.contiguous())
        run, _ = played(way, pe, self.traffic[number])
        with staged(run):
            y, made.moe = moe_forward(
                layer.forwards[rank], h.contiguous(), made.routing, layer.experts[rank], layer.config
            )
        return y

    def _experts_backward(
        self, way: str, rank: int, number: int, made: _Passed, dy: Tensor, later: list[Later]
    ) -> ExpertGradients:
        """The weight gradients left over until now are computed beside it, as the way does it."""
        layer, pe, kept = self.layers[number], self.pes[rank], self.gradients[rank]
        riders = []
        if way == "fused":
            riders = [DenseGemm("tn", a, b, a.new_empty(a.shape[1], b.shape[1])) for _, a, b in later]
            kept |= {key: rider.c for (key, _, _), rider in zip(later, riders, strict=True)}
            later.clear()
        _, run = played(way, pe, self.traffic[number], partial(_weight_gradients, later, kept))
        forward, backward = layer.forwards[rank], layer.backwards[rank]
        with staged(run):
            found = moe_backward(
                forward, made.moe, backward, dy.reshape(self.tokens, -1).contiguous(), made.routing,
                layer.experts[rank], layer.config, dense=riders,
            )  # fmt: skip
        forward.release(made.moe.use)
        return found

    def check(self) -> None:
        for layer in self.layers:
            layer.check()
        for pe in self.pes:
            pe.check()

    def rehearse(self) -> None:
        """Every way once, without any launch that could wait for another PE."""
        for way in WAYS:
            self.virtual.in_turns(partial(self.play, way))

    def eager(self, way: str) -> list[Tensor]:
        """All PEs in turns. -> the loss of each."""
        self.virtual.in_turns(partial(self.play, way))
        return list(self.loss)

    def captured(self, way: str) -> Callable[[], list[Tensor]]:
        """The step as a CUDA graph of each PE. -> what replays them all, and returns the losses."""
        graphs = []
        for rank in range(self.world):
            graph = torch.cuda.CUDAGraph()
            with self.virtual.on(rank), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                for _ in self.play(way, rank):
                    pass
            graphs.append(graph)
        losses = list(self.loss)

        def replay() -> list[Tensor]:
            self.virtual.each(lambda rank: graphs[rank].replay())
            return losses

        return replay


def players(step: Step) -> tuple[dict[str, Callable[[], list[Tensor]]], str, float]:
    """What plays a step each way, how it is launched, and how far apart the gradients of the ways are.

    That is the largest difference of any gradient, relative to its largest value.
    """
    if step.device.type == "cuda":
        with rehearsal(*JITTED):
            step.rehearse()
        torch.cuda.synchronize()
    off, expected = 0.0, None
    for way in WAYS:
        step.eager(way)
        step.check()
        # On the host: held on the device, they would make the next way ask for memory in the middle.
        gradients = [{key: g.cpu() for key, g in of.items()} for of in step.gradients]
        expected = expected or gradients
        for mine, theirs in zip(gradients, expected, strict=True):
            off = max(off, *(_difference(mine[key], theirs[key]) for key in mine.keys() | theirs.keys()))
    eager = {way: partial(step.eager, way) for way in WAYS}
    if step.device.type != "cuda":
        return eager, "one after the other", off
    try:
        return {way: step.captured(way) for way in WAYS}, "a CUDA graph for each PE", off
    except RuntimeError as error:
        launched = f"{FROM_THE_HOST}, since capturing failed: {error}"
    # Exchanges are in the middle of passes that were never launched.
    torch.cuda.synchronize()
    step.start_afresh()
    with rehearsal(*JITTED):
        step.rehearse()
    torch.cuda.synchronize()
    return eager, launched, off


def _difference(a: Tensor, b: Tensor) -> float:
    off = float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-30))
    return math.inf if math.isnan(off) else off


def measure(clock: Clock, step: Step, rounds: int, warmup: int) -> Iterator[dict]:
    plays, launched, off = players(step)
    fast_ms = [clock.once(plays["none"]) for _ in range(max(1, warmup))]
    rate = rate_for(step.bytes_of_a_step, statistics.median(fast_ms))
    taken: Taken = {}
    losses: set[tuple[float, ...]] = set()

    def play(way: str) -> None:
        nonlocal loss
        loss = plays[way]()

    loss: list[Tensor] = []
    for number in range(warmup + rounds):
        for gb_per_s in (FAST, rate):
            pace(step.pes, gb_per_s)
            for way in WAYS:
                ms = clock.once(partial(play, way))
                step.check()
                losses.add(tuple(map(float, loss)))
                if number >= warmup:
                    taken.setdefault((way, gb_per_s), []).append(ms)
    pace(step.pes, FAST)
    sizes, model = step.sizes, step.model
    name = f"step of {model.name}"
    if launched.startswith(FROM_THE_HOST):
        name += f", launched {FROM_THE_HOST}"
    yield figure(name, taken, rate, step.bytes_of_a_step, has_goals=True) | {
        "sizes": {
            **sizes.letters(), "W": step.world, "C": step.layers[0].capacity, "layers": model.layers,
            "sequence": model.sequence, "vocab": step.vocab,
        },
        "name": sizes.name,
        "launched": launched,
        "losses": sorted(losses),
        "largest_difference": off,
        "difference_allowed": DIFFERENCE_ALLOWED,
    }  # fmt: skip
