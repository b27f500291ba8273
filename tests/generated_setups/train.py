"""Trains the model of a set-up on the ranks of a job, plain and planned: both must give the same.

The plain module's gradients are summed over the ranks by hand. Compared in every step: losses, gradients,
parameters and buffers.
"""

from __future__ import annotations

import contextlib
import copy
import math
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

from lancet_kernels import CaptureError, expert_parameters, set_routing_step
from lancet_kernels.errors import UserError
from lancet_kernels.layer.gradients import clip_gradients
from lancet_kernels.ops.comm.groups import Groups
from tests.generated_setups.describe import STEPS, Setup
from tests.generated_setups.modules import D, S, V, build, inner
from tests.optimized import optimized

BOUND = 1e-9
"""Largest difference in float64, relative to the largest value if that is over 1. Seen where all is right:
1e-13."""
OVERFLOW_STEP = 1


@dataclass
class Outcome:
    """What became of a set-up on a rank.

    kind: "right", "refused" or "failed". why: the message, or what differs. where: of an error, its place.
    """

    kind: str
    why: str = ""
    where: str = ""


def run_setup(setup: Setup) -> Outcome:
    """On a rank. Every error is an outcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.compiler.reset()
            found = _compared(setup)
            dist.barrier()
        except Exception as error:
            refused = isinstance(error, (UserError, CaptureError)) and "\n" not in str(error)
            kind = "refused" if refused else "failed"
            found = Outcome(kind, f"{type(error).__name__}: {error}", _place(error))
    return found


def _place(error: BaseException) -> str:
    """Where an error was raised: the last lines of its traceback in this repository."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "/lib/python" not in f.filename]
    return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in reversed(own[-4:]))


def _compared(setup: Setup) -> Outcome:
    plain, planned = Trained(setup, planned=False), Trained(setup, planned=True)
    for step in range(STEPS):
        for one in (plain, planned):
            one.before(step)
        try:
            wanted = plain.step(step)
        except Exception as error:  # not what is tested
            return Outcome("failed", f"the plain module: {type(error).__name__}: {error}", _place(error))
        found = planned.step(step)
        for name in [*wanted, *(name for name in found if name not in wanted)]:
            if difference := _difference(wanted.get(name), found.get(name)):
                return Outcome("failed", f"step {step}: {name} {difference}")
    return Outcome("right")


def _difference(wanted: Tensor | None, found: Tensor | None) -> str:
    """ "" if they are the same up to rounding."""
    if wanted is None or found is None:
        return "" if wanted is found else f"is {'there' if wanted is None else 'missing'}"
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return f"is {found.dtype} {list(found.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    wanted, found = wanted.double(), found.double()
    if not wanted.isfinite().all():
        return "" if not found.isfinite().all() else "is finite"
    if not wanted.numel():
        return ""
    off = float((wanted - found).abs().max() / wanted.abs().max().clamp(min=1.0))
    return "" if off < BOUND else f"is off by {off:.1e}"


class Trained:
    """A model in training: with `optimize` if planned, otherwise as it is."""

    def __init__(self, setup: Setup, planned: bool) -> None:
        self.setup, self.loop, self.planned = setup, setup.loop, planned
        self.model = build(setup)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=bool(self.loop.scaler))
        self._start()

    def _start(self) -> None:
        """The module to call, and the optimizer of the model."""
        self.call: nn.Module = self.model
        if self.planned:
            under = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
            with under.get(self.setup.under, contextlib.nullcontext)():
                self.call = optimized(
                    self.model,
                    self._examples(),
                    self.setup.strategy,
                    reduce_gradients="sum" if self.setup.sums else False,
                )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.loop.optimizer == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        else:  # of a gradient of zero rounding is not to become a step
            self.optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-2)
        rates = [1.0, 0.5, 0.25] if self.loop.schedule else [1.0] * STEPS
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rates[min(step, STEPS - 1)]
        )

    def _examples(self) -> dict[str, object] | tuple[object, ...]:
        inputs = self._inputs(0, 0)
        return inputs if self.setup.by_name else tuple(inputs.values())

    # ---- Between steps

    def before(self, step: int) -> None:
        """What happens to the model before a step."""
        if step == self.loop.change_at:
            if self.planned and self.loop.resume:
                self._resume()
            if not self.loop.one_rank or dist.get_rank() == 1:
                self._change()
        set_routing_step(self.model, step)

    def _change(self) -> None:
        change, blocks = self.loop.change, self.model.blocks
        block = inner(blocks[self.loop.change_block]) if len(blocks) else None
        other = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
        if change == "evaluate":
            self.call.eval()
            with torch.no_grad():
                self._call(self._inputs(9, 0))
            self.call.train()
        elif change == "reload":
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        elif change == "freeze":
            block.requires_grad_(False)
        elif change == "eval":
            block.eval()
        elif change == "skip":
            block.skipped = True
        elif change == "hook":
            blocks[self.loop.change_block].register_forward_hook(lambda _block, _inputs, output: 1.5 * output)
        elif change == "p":
            block.drop.p = 0.5
        elif change == "capacity":
            block.layer.capacity_factor = 0.5
        elif change == "replace tensor":
            block.place(other)
        elif change == "change tensor":
            block.placed().copy_(other)
        elif change == "replace buffer":
            block.scale = other
        elif change == "change buffer":
            block.scale.copy_(other)

    def _resume(self) -> None:
        """Go on in another module, from what a checkpoint holds."""
        before, schedule = self.optimizer, self.schedule
        if self.loop.resume == "dcp":
            state, optimizer_state = dcp.get_state_dict(self.model, before)
        else:
            state, optimizer_state = self.model.state_dict(), before.state_dict()
        state, optimizer_state = copy.deepcopy(state), copy.deepcopy(optimizer_state)
        self.model = build(self.setup)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)
        self._start()
        if self.loop.resume == "dcp":
            dcp.set_state_dict(
                self.model, self.optimizer, model_state_dict=state, optim_state_dict=optimizer_state
            )
        else:
            self.model.load_state_dict(state)
            self.optimizer.load_state_dict(optimizer_state)
        self.schedule.load_state_dict(schedule.state_dict())

    # ---- A step

    def step(self, step: int) -> dict[str, Tensor]:
        """Forward, backward, update. -> all that is to be compared, by name."""
        for _, parameter in self._named_tensors():
            parameter.grad = None
        self.inputs: list[Tensor] = []
        losses = list(self._backward(step))
        if not self.planned and self.setup.sums:
            self._sum_gradients()
        self.scaler.unscale_(self.optimizer)
        if self.loop.clip:
            clip_gradients(self.model, self.loop.clip, Groups.around())
        gradients = {name: p.grad for name, p in self._named_tensors() if p.grad is not None}
        found = {f"loss {n}": loss for n, loss in enumerate(losses)}
        found |= {f"gradient of input {n}": x.grad for n, x in enumerate(self.inputs) if x.grad is not None}
        found |= {f"gradient of {name}": gradient.clone() for name, gradient in gradients.items()}
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        found |= {f"{name} after it": tensor.detach().clone() for name, tensor in self._named_tensors()}
        found |= {f"buffer {name}": tensor.clone() for name, tensor in self.model.named_buffers()}
        if self.scaler.is_enabled():
            found["scale"] = torch.tensor(self.scaler.get_scale(), dtype=torch.float64)
        return found

    def _backward(self, step: int) -> Iterator[Tensor]:
        total = None
        for micro in range(2 if self.loop.accumulate else 1):
            torch.manual_seed(100 * step + 10 * micro + dist.get_rank())  # for dropout
            result = self._call(self._inputs(step, micro))
            loss = result["loss"] if isinstance(result, dict) else result
            if self.loop.outer and isinstance(result, dict):
                loss = loss + 0.1 * result["logits"].square().mean()
            if self.loop.penalty:
                loss = loss + 0.1 * self.model.head.weight.square().sum()
            yield loss.detach().clone()
            if isinstance(result, dict):
                yield result["logits"].detach().clone()
            if self.loop.accumulate == "sum":
                total = loss if total is None else total + loss
            else:
                self.scaler.scale(loss).backward()
        if total is not None:
            self.scaler.scale(total).backward()

    def _sum_gradients(self) -> None:
        """Over the ranks, as `optimize` does: of all but experts."""
        experts = set(expert_parameters(self.model))
        for _, parameter in self._named_tensors():
            if parameter in experts or not parameter.requires_grad:
                continue
            used = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(used)
            if used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and plain tensors that train."""
        yield from self.model.named_parameters()
        for number, block in enumerate(self.setup.blocks):
            if block.kind == "plain":
                yield f"plain tensor {number}", inner(self.model.blocks[number]).placed()

    def _call(self, inputs: dict[str, object]) -> Tensor | dict[str, Tensor]:
        self.inputs += [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        return self.call(**inputs) if self.setup.by_name else self.call(*inputs.values())

    def _inputs(self, step: int, micro: int) -> dict[str, object]:
        """The inputs of this rank."""
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
        size = self.loop.sizes[min(step, STEPS - 1)]
        if self.loop.uneven and rank == 1 and step:  # examples must be alike
            size = max(1, size - 1)
        target = torch.randint(V, (size, S), generator=generator)
        if self.setup.tokens:
            x = torch.randint(V, (size, S), generator=generator)
        else:
            x = torch.randn(size, S, D, dtype=torch.float64, generator=generator)
            if self.loop.scaler == "overflow" and step == OVERFLOW_STEP and rank == 1:
                x *= math.inf
            x.requires_grad_(self.loop.input_gradient)
        inputs: dict[str, object] = {"x": x, "target": target}
        if self.loop.number:
            inputs["times"] = 2 if self.loop.number == "other" and step == STEPS - 1 else 3
        return inputs
