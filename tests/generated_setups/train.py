"""Trains the model of a set-up on the ranks of a job, plain and planned: both must give the same.

The plain module's gradients are summed over the ranks by hand. Compared in every step: losses, gradients,
parameters and buffers.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lancet_kernels import CaptureError, OptimizedModule, expert_parameters, fsdp, set_routing_step
from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.layer.gradients import clip_gradients
from lancet_kernels.ops.comm.groups import Groups, group_of
from lancet_kernels.ops.comm.link import emulate_link
from lancet_kernels.optimization.optimize import optimize
from tests.generated_setups.describe import STEPS, Setup
from tests.generated_setups.modules import D, S, V, build, inner
from tests.optimized import optimized

BOUND = 1e-9
"""Largest difference in float64, relative to the largest value if that is over 1. Seen where all is right:
1e-13."""
BOUNDS = {"lower precision": 1e-2}
"""By how FSDP holds the parameters: float32 computes there, and rounds otherwise on other CPUs; a sum that is
missing is off by half."""
LINK_GBPS = 1.0
OVERFLOW_STEP = 1


@dataclass
class Outcome:
    """What became of a set-up on a rank.

    kind: "right", "refused", "lost a rank" or "failed". why: the message, what differs, or why a plan did not
    run. where: of an error, its place.
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
            emulate_link(LINK_GBPS if setup.link else None)
            found = _compared(setup)
            # Not after a difference that one rank alone sees: its peer waits elsewhere.
            if found.kind == "right":
                dist.barrier()
        except Exception as error:
            one_line = "\n" not in str(error)
            refused = isinstance(error, (UserError, CaptureError)) and one_line
            lost = isinstance(error, CommunicationError) and one_line
            kind = "refused" if refused else "lost a rank" if lost else "failed"
            found = Outcome(kind, f"{type(error).__name__}: {error}", _place(error))
    return found


def _place(error: BaseException) -> str:
    """Where an error was raised: the last lines of its traceback in this repository."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "/lib/python" not in f.filename]
    return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in reversed(own[-4:]))


def _compared(setup: Setup) -> Outcome:
    groups = _groups(setup)
    plain, planned = Trained(setup, groups, planned=False), Trained(setup, groups, planned=True)
    bound = BOUNDS.get(setup.shard, BOUND)
    for step in range(STEPS):
        for one in (plain, planned):
            one.before(step)
        try:
            wanted = plain.step(step)
        except Exception as error:  # not what is tested
            return Outcome("failed", f"the plain module: {type(error).__name__}: {error}", _place(error))
        found = planned.step(step)
        for name in [*wanted, *(name for name in found if name not in wanted)]:
            if difference := _difference(wanted.get(name), found.get(name), bound):
                return Outcome("failed", f"step {step}: {name} {difference}")
    return Outcome("right", ", ".join(planned.fallbacks))


def _groups(setup: Setup) -> Groups | None:
    """None: those that the library makes for one expert group of all ranks."""
    if setup.expert_ranks == setup.ranks:
        return None
    shape = setup.ranks // setup.expert_ranks, setup.expert_ranks
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert"))
    return Groups.from_mesh(mesh, "expert", "replica")


def _difference(wanted: Tensor | None, found: Tensor | None, bound: float = BOUND) -> str:
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
    return "" if off < bound else f"is off by {off:.1e}"


class Trained:
    """A model in training: with `optimize` if planned, otherwise as it is."""

    def __init__(self, setup: Setup, groups: Groups | None, planned: bool) -> None:
        self.setup, self.loop, self.planned, self.groups = setup, setup.loop, planned, groups
        self.all_groups = groups or Groups.around()
        self.fallbacks: dict[str, int] = {}
        self.model = build(setup, groups)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=bool(self.loop.scaler))
        self._start()

    def _start(self) -> None:
        """The module to call, and the optimizer of the model."""
        self.call: nn.Module = self.model
        if self.planned:
            self._shard()
            under = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
            with under.get(self.setup.under, contextlib.nullcontext)():
                self.call = self._optimized()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.loop.optimizer == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        else:  # of a gradient of zero rounding is not to become a step
            kind = {"adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}[self.loop.optimizer]
            self.optimizer = kind(trained, lr=0.01, eps=1e-2)
        rates = [1.0, 0.5, 0.25] if self.loop.schedule else [1.0] * STEPS
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rates[min(step, STEPS - 1)]
        )

    def _shard(self) -> None:
        if not (shard := self.setup.shard):
            return
        shape = (2, self.setup.ranks // 2) if shard == "replicated" else (self.setup.ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
        options: dict[str, object] = {}
        if shard == "kept":
            options["reshard_after_forward"] = False
        if shard == "lower precision":
            options["mp_policy"] = MixedPrecisionPolicy(torch.float32, torch.float32)
        fsdp(self.model, mesh, self.groups, **options)

    def _optimized(self) -> OptimizedModule:
        accumulates = self.loop.accumulate in ("no_sync", "microbatches")
        options = {"reduce_gradients": self.setup.reduce, "accumulate": 2 if accumulates else 1}
        if not self.setup.measured:
            return optimized(self.model, self._examples(), self.setup.strategy, **options)
        with tempfile.TemporaryDirectory() as folder:
            options |= {"times": f"{folder}/times.json", "trials": 1, "strategy": self.setup.strategy}
            return optimize(self.model, self._examples(), **options)

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
            self.model.load_state_dict(_copied(self.model.state_dict()))
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
        state, optimizer_state = _copied(state), _copied(optimizer_state)
        self._note_fallbacks()
        self.model = build(self.setup, self.groups)
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
        # Not by the model, whose parameters FSDP leaves gathered behind an evaluation.
        self.optimizer.zero_grad()
        for _, tensor in self._plain_tensors():
            tensor.grad = None
        self.inputs: list[Tensor] = []
        losses = list(self._backward(step))
        if not self.planned and self.setup.reduce:
            self._sum_gradients()
        self.scaler.unscale_(self.optimizer)
        if self.loop.clip:
            clip_gradients(self.model, self.loop.clip, self.all_groups)
        gradients = {name: p.grad for name, p in self._named_tensors() if p.grad is not None}
        found = {f"loss {n}": loss for n, loss in enumerate(losses)}
        found |= {f"gradient of input {n}": x.grad for n, x in enumerate(self.inputs) if x.grad is not None}
        found |= {f"gradient of {name}": _whole(gradient) for name, gradient in gradients.items()}
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        found |= {f"{name} after it": _whole(tensor) for name, tensor in self._named_tensors()}
        found |= {f"buffer {name}": tensor.clone() for name, tensor in self.model.named_buffers()}
        if self.scaler.is_enabled():
            found["scale"] = torch.tensor(self.scaler.get_scale(), dtype=torch.float64)
        if self.setup.shard == "lower precision":
            found = {name: tensor.double() for name, tensor in found.items()}
        self._note_fallbacks()
        return found

    def _note_fallbacks(self) -> None:
        self.fallbacks |= getattr(self.call, "fallbacks", {})

    def _backward(self, step: int) -> Iterator[Tensor]:
        if self.loop.accumulate == "microbatches":
            yield from self._microbatches(step)
            return
        total = None
        for micro in range(2 if self.loop.accumulate else 1):
            torch.manual_seed(100 * step + 10 * micro + dist.get_rank())  # for dropout
            alone = self.planned and self.loop.accumulate == "no_sync" and micro == 0
            with self.call.no_sync() if alone else contextlib.nullcontext():
                result = self._call(self._inputs(step, micro))
                loss = result["loss"] if isinstance(result, dict) else result
                if self.loop.outer and isinstance(result, dict):
                    loss = loss + 0.1 * result["logits"].square().sum() / (4 * S * V)
                if self.loop.penalty:
                    loss = loss + 0.1 * self.model.head.weight.square().sum()
                yield from _shown(result, loss)
                if self.loop.accumulate == "sum":
                    total = loss if total is None else total + loss
                else:
                    self.scaler.scale(loss).backward()
        if total is not None:
            self.scaler.scale(total).backward()

    def _microbatches(self, step: int) -> Iterator[Tensor]:
        """Two, in one call; their mean, unless losses are summed."""
        torch.manual_seed(100 * step + dist.get_rank())
        batches = [self._inputs(step, micro) for micro in range(2)]
        self.inputs += [x for batch in batches for x in _trained_inputs(batch)]
        if self.planned:
            by_name = self.setup.by_name
            results = self.call.microbatches([b if by_name else tuple(b.values()) for b in batches])
        else:
            results = []
            for batch in batches:
                results.append(self.call(**batch))
                loss = results[-1]["loss"] if isinstance(results[-1], dict) else results[-1]
                (loss if self.setup.reduce == "sum" else loss / 2).backward()
        for result in results:
            yield from _shown(result, result["loss"] if isinstance(result, dict) else result)

    def _sum_gradients(self) -> None:
        """Over the ranks, as `optimize` does: those of experts over the ranks that hold the same ones."""
        experts, groups = set(expert_parameters(self.model)), self.all_groups
        for _, parameter in self._named_tensors():
            name = groups.replica if parameter in experts else groups.data
            if not parameter.requires_grad:
                continue
            if name:
                used = torch.tensor(float(parameter.grad is not None))
                dist.all_reduce(used, group=group_of(name))
                if used and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if used:
                    dist.all_reduce(parameter.grad, group=group_of(name))
            if self.setup.reduce == "mean" and parameter.grad is not None:
                parameter.grad /= self.setup.ranks

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and plain tensors that train."""
        yield from self.model.named_parameters()
        yield from self._plain_tensors()

    def _plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, block in enumerate(self.setup.blocks):
            if block.kind == "plain":
                yield f"plain tensor {number}", inner(self.model.blocks[number]).placed()

    def _call(self, inputs: dict[str, object]) -> Tensor | dict[str, Tensor]:
        self.inputs += _trained_inputs(inputs)
        return self.call(**inputs) if self.setup.by_name else self.call(*inputs.values())

    def _inputs(self, step: int, micro: int) -> dict[str, object]:
        """The inputs of this rank."""
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
        size = self.loop.sizes[min(step, STEPS - 1)]
        if self.loop.uneven and rank == 1 and (step or micro):  # examples must be alike
            size = max(1, size - 1) if self.loop.uneven == "one less" else 0
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


def _whole(tensor: Tensor) -> Tensor:
    """A copy, of all shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _copied(state: dict[str, object]) -> dict[str, object]:
    """A copy; torch cannot deepcopy a DTensor that is a view."""
    return tree_map_only(Tensor, torch.clone, state)


def _trained_inputs(inputs: dict[str, object]) -> list[Tensor]:
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


def _shown(result: Tensor | dict[str, Tensor], loss: Tensor) -> list[Tensor]:
    """What is compared of a call."""
    return [loss.detach().clone(), *([result["logits"].detach().clone()] if isinstance(result, dict) else [])]
