"""What a trainer does to a module around `optimize`: it works, falls back to the plain module, or is refused.

Each row of the documentation's support matrix is a test here, described by its docstring. All rows of one
number of ranks run in one call of the pool; loss and all gradients are compared with those of the plain
module.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lancet_kernels import (
    MoELayer,
    clip_gradients,
    ddp,
    expert_parameters,
    fsdp,
    moe_losses,
    prepare_data_parallel,
)
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.schedules.plan import PLAIN
from tests.generated_setups.modules import LowRank
from tests.lancet_kernels.optimization import what_models_read
from tests.optimized import BOUND, optimized
from tests.planned_steps import gradients, outcome, sum_over_ranks
from tests.setups import B, D, Model, Plain, S, Setup, batch, changed, compare_mean, refused, restored

Row = Callable[[Setup], None]


def rows(before: Iterable[Row] = ()) -> list[Row]:
    """The functions of a Setup that this file has defined so far, but those `before`."""
    annotated = [f for f in globals().values() if "Setup" in getattr(f, "__annotations__", {}).values()]
    return [row for row in annotated if row not in before]


# ---- Works. Each function gets a Setup that others have used before, and leaves it as it was.


def inputs_by_name(setup: Setup) -> None:
    """Inputs by position, by name, or left out where they have a default."""
    x, target = batch(1)
    setup.compare(target=target, x=x)
    setup.compare(x, target=target)
    setup.compare(x, target, 1.0)  # the default


def sliced_and_transposed_inputs(setup: Setup) -> None:
    """Inputs that are sliced, transposed or expanded."""
    wide = torch.randn(B, S + 1, D + 2, dtype=torch.float64)
    setup.compare(wide[:, :-1, :D], wide[:, 1:, 2:])
    turned = torch.randn(S, B, D, dtype=torch.float64).transpose(0, 1)
    setup.compare(turned, torch.zeros(1, 1, D, dtype=torch.float64).expand(B, S, D))


def sliced_example_inputs(_setup: Setup) -> None:
    """Example inputs that are slices; later ones that are not."""
    wide = torch.randn(B, S + 1, D, dtype=torch.float64)
    own = Setup(Plain(), (wide[:, :-1], wide[:, 1:]))
    own.compare(wide[:, :-1], wide[:, 1:])
    own.compare(*batch())


def the_same_tensor_twice(setup: Setup) -> None:
    """One tensor as two inputs."""
    x, _ = batch()
    setup.compare(x, x)
    own = Setup(Plain(), (x, x))
    own.compare(*batch(1))


def example_inputs_in_a_dict(_setup: Setup) -> None:
    """Example inputs in a dict, numbers among them."""
    x, target = batch()
    own = Setup(Plain(), {"target": target, "x": x, "scale": 2.0})
    own.compare(x, scale=2.0, target=target)
    own.compare(x, target, 2.0)
    own.falls_back("another number among the inputs", x, target, 3.0)


def retain_graph(setup: Setup) -> None:
    """`backward(retain_graph=True)` (not with fused layers)."""
    loss = setup.ready(*batch())
    loss.backward(retain_graph=True)
    once = gradients(setup.model)
    loss.backward()
    twice = gradients(setup.model)
    assert all(torch.equal(2 * once[name], twice[name]) for name in once)
    setup.compare(*batch())


def two_calls_in_a_backward(setup: Setup) -> None:
    """The sum of two calls, in one backward."""
    setup.compare_calls(lambda module: module(*batch()) + 2 * module(*batch(1)))


def activation_checkpointing(setup: Setup) -> None:
    """`torch.utils.checkpoint` around the optimized module."""
    setup.compare_calls(lambda module: checkpoint(module, *batch(), use_reentrant=False))


def torch_compile_around(setup: Setup) -> None:
    """`torch.compile` around the optimized module."""
    compiled = torch.compile(setup.ready, backend="eager")
    x, target = batch()
    setup.compare_calls(lambda module: compiled(x, target) if module is setup.ready else module(x, target))


def hooks_on_parameters(setup: Setup) -> None:
    """Gradient hooks on parameters."""
    # A linear one: it sees the sum over the ranks where the plain module's sees one rank's.
    with setup.model.input.weight.register_hook(lambda gradient: 3 * gradient):
        setup.compare(*batch())
    model = Plain()
    model.input.weight.register_hook(lambda gradient: 3 * gradient)
    Setup(model).compare(*batch())


def updates_and_load_state_dict(setup: Setup) -> None:
    """Optimizer steps, and `load_state_dict`."""
    before = copy.deepcopy(setup.model.state_dict())
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter.add_(0.1)
    setup.compare(*batch())
    setup.model.load_state_dict(before)
    setup.compare(*batch())


def attributes_that_nobody_reads(setup: Setup) -> None:
    """New attributes that the forward does not read."""
    setup.model.note, setup.model.input.step = "mine", 3
    setup.compare(*batch())
    del setup.model.note, setup.model.input.step


def without_gradients(setup: Setup) -> None:
    """Calls under `torch.no_grad`, with other shapes or in evaluation mode."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        short = batch(size=2)
        assert torch.equal(setup.ready(*short), setup.model(*short))
        setup.ready.eval()
        assert torch.equal(setup.ready(*short), setup.model(*short))
        setup.ready.train()
    setup.compare(*batch())


def data_parallel_that_sums_alone(_setup: Setup) -> None:
    """`ddp(step)` around a plan with `reduce_gradients=False`: DistributedDataParallel averages gradients."""
    own, plain = Setup(reduce_gradients=False), Model()
    wrapped = ddp(own.ready)
    for number in range(2):  # the second time in other buckets
        got = outcome(own.model, wrapped(*batch(number)), reduced=True)
        wanted = outcome(plain, plain(*batch(number)), reduced=False)
        wanted.gradients = {name: g / dist.get_world_size() for name, g in wanted.gradients.items()}
        assert got.distance(wanted) < BOUND
    assert not own.ready.fallbacks


def fully_sharded(_setup: Setup) -> None:
    """`fully_shard` (FSDP2) before `optimize`: its gathers and scatters are part of the plan."""
    model, plain, ranks = fsdp(Model()), Model(), dist.get_world_size()
    ready = optimized(model, batch(), "lancet", reduce_gradients="mean")
    for number in range(2):
        wanted = outcome(plain, plain(*batch(number)), reduced=False)
        ready(*batch(number)).backward()
        for name, gradient in gradients(model).items():
            assert (gradient.full_tensor() - wanted.gradients[name] / ranks).abs().max() < BOUND
        model.zero_grad()
    assert not ready.fallbacks


def gradients_of_the_mean(_setup: Setup) -> None:
    """`reduce_gradients="mean"`, the default: the loss is not divided by the number of ranks."""
    model, ranks = Model(), dist.get_world_size()
    ready = optimized(model, batch(), reduce_gradients="mean")
    x, target = batch()
    given = x.clone().requires_grad_()
    for mode in (ready.train, ready.eval):
        wanted = outcome(model, model(x, target), reduced=False)
        wanted.gradients = {name: g / ranks for name, g in wanted.gradients.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert outcome(model, mode()(x, target), reduced=True).distance(wanted) < BOUND
    own = optimized(model, (given, target), reduce_gradients="mean")
    by_input = [torch.autograd.grad(module(given, target), given)[0] for module in (model, own)]
    assert (by_input[0] - by_input[1]).abs().max() < BOUND


def several_microbatches(_setup: Setup) -> None:
    """`accumulate` with `microbatches`, in pairs or one by one: their mean, summed over the ranks once."""
    for strategy in ("none", "microbatches"):
        model = Model()
        ready = optimized(model, batch(), strategy, reduce_gradients="mean", accumulate=3)
        for number in (3, 1, 2):  # also fewer than were planned
            batches = [batch(n) for n in range(number)]
            compare_mean(model, batches, partial(ready.microbatches, batches))
        assert not ready.fallbacks


def pairs_with_a_smaller_batch_on_a_rank(_setup: Setup) -> None:
    """`strategy="microbatches"` where one rank has a smaller batch: planned, but one by one."""
    model = Model()
    ready = optimized(model, batch(), "microbatches", reduce_gradients="mean", accumulate=2)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for size in (B - 1, B):
        batches = [batch(0), batch(1, size if is_last else B)]
        compare_mean(model, batches, partial(ready.microbatches, batches))
    assert not ready.fallbacks


def no_sync(_setup: Setup) -> None:
    """`with step.no_sync():` around all microbatches but the last, as in DistributedDataParallel."""
    model = Model()
    ready = optimized(model, batch(), "lancet-dw", reduce_gradients="mean", accumulate=3)
    batches = [batch(number) for number in range(3)]

    def run() -> None:
        for number, inputs in enumerate(batches):
            with ready.no_sync() if number < 2 else contextlib.nullcontext():
                (ready(*inputs) / 3).backward()

    compare_mean(model, batches, run)
    assert not ready.fallbacks


def batches_of_other_sizes(_setup: Setup) -> None:
    """Batches of different sizes on every rank, some smaller than the number of parts, with a plan that cuts.

    Each is captured once; rank 0 meets one size, rank 1 all of them.
    """
    own = Setup(strategy="lancet")
    assert own.ready.plan.ranges
    for number, size in enumerate((B - 1, 1, B - 1)):
        own.compare(*batch(number, B - 1 if dist.get_rank() == 0 else size))
    assert len(own.ready._others) == (1 if dist.get_rank() == 0 else 2)


class Padded(Model):
    """x[B, S, D], target[B, S, D], mask[B, S] -> loss of the tokens that are no padding."""

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        y, sums = self.layer(torch.tanh(self.input(x)), mask=mask, return_sums=True)
        error = (self.output(x + y) - target).square().mean(-1)
        return (error * mask).sum() + moe_losses([sums]).balance.mean()


def padded_batches(_setup: Setup) -> None:
    """Padding (`mask` of `MoELayer.forward`): it takes no slot and counts in no loss, also where the batch is
    cut."""
    own = Setup(Padded(), (*batch(), torch.ones(B, S, dtype=torch.int64)), "lancet")
    for lengths in ([3, 1, 0, 2], [0, 0, 0, 0]):
        mask = (torch.arange(S) < torch.tensor(lengths)[:, None]).long()
        own.compare(*batch(1), mask)


class Normed(nn.Module):
    """x[B, S, D], target[B, S, D] -> loss. A norm behind the MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(D, D), MoELayer(D, 12, 4), nn.LayerNorm(D)).double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.inner(x) - target).square().mean()


def part_of_a_layer_trained(_setup: Setup) -> None:
    """Some parameters of an MoE layer trained, all others frozen."""
    cases = [(("w1",), "duplex"), (("w2",), "lancet"), (("w1", "w2"), "duplex"), (("router",), "lancet")]
    for trained, strategy in cases:
        model = Normed()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[2] in trained)
        Setup(model, strategy=strategy).compare(*batch(1))


class Tied(nn.Module):
    """Embedding and head, two linear layers, and the experts of two layers with one weight; a module with
    buffers under two names; all of it in checkpointed blocks, or not."""

    def __init__(self, **checkpointed: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(D, D), nn.Linear(D, D, bias=False)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList(MoELayer(D, 12, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(D)
        self.head.weight = self.embedding.weight
        self.second.weight = self.first.weight
        self.layers[1].w1 = self.layers[0].w1
        self.again = self.norm
        self.checkpointed = checkpointed
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = x + self.embedding(torch.arange(S))
        for linear, layer, norm in zip(
            (self.first, self.second), self.layers, (self.norm, self.again), strict=True
        ):
            block = partial(self.block, linear, layer, norm)
            h = checkpoint(block, h, **self.checkpointed) if self.checkpointed else block(h)
        return (self.head(h) - target).square().mean()

    def block(self, linear: nn.Module, layer: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        # Transposed twice: torch tells wrong strides of a batch norm.
        x = norm((x + torch.tanh(linear(x))).transpose(1, 2)).transpose(1, 2)
        return x + layer(x)


def tied_weights(_setup: Setup) -> None:
    """Tied weights, of layers and experts, and a module under two names: a gradient is summed once."""
    own = Setup(Tied(), strategy="lancet")  # in copies, too: selective_checkpointing
    own.compare(*batch(1))
    own.ready.eval()
    own.falls_back("the module is in evaluation mode")
    own.ready.train()
    own.compare(*batch(1))


def checkpointed_blocks(_setup: Setup) -> None:
    """Activation checkpointing inside the model, `use_reentrant` or not."""
    for use_reentrant, strategy in ((False, "none"), (True, "lancet")):
        x, target = batch()
        x.requires_grad_(use_reentrant)  # torch's own recomputation gives no gradients otherwise
        own = Setup(Tied(use_reentrant=use_reentrant), (x, target), strategy)
        own.compare(x, target)
        assert own.ready.plan.report.recomputation is not None


class Undecided(Model):
    """Logits are noise alone, which is drawn anew when the checkpointed block runs again."""

    checkpointed = True

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            logits = 0 * self.input(x)[..., :4] + 1e-9 * torch.rand(*x.shape[:2], 4, dtype=x.dtype)
            return x + self.layer(torch.tanh(self.input(x)), logits_TE=logits.flatten(0, 1))

        options = {"use_reentrant": False, "preserve_rng_state": False}
        h = checkpoint(block, x, **options) if self.checkpointed else block(x)
        return (self.output(h) - target).square().mean()


def checkpointed_ties(_setup: Setup) -> None:
    """Activation checkpointing of a router that chooses otherwise when it runs again."""
    own = Setup(Undecided())

    def loss_of(module: nn.Module) -> Tensor:
        torch.manual_seed(1)
        return module(*batch(1))

    own.compare_calls(loss_of)
    checkpointed = outcome(own.model, loss_of(own.model), reduced=False)
    with changed(own.model, checkpointed=False):
        plain = outcome(own.model, loss_of(own.model), reduced=False)
    assert checkpointed.distance(plain) < BOUND


def reentrant_checkpoints_that_are_tried(_setup: Setup) -> None:
    """`strategy="auto"` around `use_reentrant=True`: trials run it; on several ranks, only plans."""
    x, target = batch()
    x.requires_grad_(True)
    model = Tied(use_reentrant=True)
    updates = []
    model.first.weight.register_post_accumulate_grad_hook(updates.append)
    with tempfile.TemporaryDirectory() as folder:
        times = f"{folder}/times.json"
        ready = optimize(model, (x, target), times=times, reduce_gradients="sum", trials=1)
    tried = set(ready.plan.report.measured)
    assert "none" in tried
    assert (PLAIN in tried) == (dist.get_world_size() == 1)
    assert x.grad is None
    assert not updates
    plain = outcome(model, model(x, target), reduced=False)
    assert outcome(model, ready(x, target), reduced=True).distance(plain) < BOUND


def frozen_below_adapters(_setup: Setup) -> None:
    """Frozen embeddings, PEFT's hook (`requires_grad_()` on their output), and activation checkpointing."""
    for use_reentrant, strategy in ((True, "none"), (False, "lancet")):
        model = Tied(use_reentrant=use_reentrant)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("first", "layers.1")))
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(True))
        Setup(model, strategy=strategy).compare(*batch(1))


def adapters_of_experts(_setup: Setup) -> None:
    """LoRA of experts as parametrizations, all else frozen."""
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(dist.get_rank())
    for name in ("w1", "w2"):
        w = getattr(model.layer, name)
        a, b = (torch.randn(len(w), *shape, dtype=w.dtype) for shape in ((w.shape[1], 2), (2, w.shape[2])))
        nn.utils.parametrize.register_parametrization(model.layer, name, LowRank(a, b))
    own = Setup(model, strategy="lancet")
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 4
    own.compare(*batch(1))


def selective_checkpointing(_setup: Setup) -> None:
    """Selective activation checkpointing (`create_selective_checkpoint_contexts`)."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    own = Setup(Tied(use_reentrant=False, context_fn=contexts), strategy="lancet+duplex")
    own.compare(*batch(1))
    own.compare(*batch(1, B + 2))
    assert own.ready.plan.report.recomputation is not None


def optimized_without_gradients(_setup: Setup) -> None:
    """`optimize` called under `torch.no_grad` or `torch.inference_mode`."""
    for mode in (torch.no_grad, torch.inference_mode):
        model = Plain()
        with mode():
            own = Setup(model, batch())
        own.compare(*batch(1))


def clipping(_setup: Setup) -> None:
    """`clip_gradients`: by the norm of the whole model, with all experts."""
    own, plain = Setup(compare_every=1), Model()
    optimizer = torch.optim.SGD(own.model.parameters(), lr=0.1)
    for number in range(3):
        plain.load_state_dict(own.model.state_dict())
        whole = outcome(plain, plain(*batch(number)), reduced=False).gradients
        squares = {name: gradient.square().sum() for name, gradient in whole.items()}
        for name in ("layer.w1", "layer.w2"):
            dist.all_reduce(squares[name])
        own.ready(*batch(number)).backward()
        norm = clip_gradients(own.model, 0.01)
        torch.testing.assert_close(norm, sum(squares.values()).sqrt(), rtol=BOUND, atol=0.0)
        for name, gradient in gradients(own.model).items():
            torch.testing.assert_close(gradient, whole[name] * (0.01 / (norm + 1e-6)), rtol=BOUND, atol=BOUND)
        optimizer.step()
        optimizer.zero_grad()


def infinity_and_a_grad_scaler(_setup: Setup) -> None:
    """A GradScaler, and infinity on one rank: all ranks leave out that step."""
    own, plain = Setup(strategy="lancet"), Model()
    runs = [(own.ready, own.model), (plain, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in runs]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _, model in runs]
    for number in range(3):
        x, target = batch(number)
        if number == 1 and dist.get_rank() == 0:
            x[0, 0, 0] = torch.inf
        for (module, model), scaler, optimizer in zip(runs, scalers, optimizers, strict=True):
            scaler.scale(module(x, target)).backward()
            if module is plain:
                for name, gradient in sum_over_ranks(model, gradients(model)).items():
                    model.get_parameter(name).grad = gradient
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == (8.0 if number == 0 else 4.0)
        for parameter, wanted in zip(own.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=BOUND, atol=BOUND)
    assert not own.ready.fallbacks


def overflow_in_float16(_setup: Setup) -> None:
    """float16 that overflows on one rank, with a GradScaler."""
    with torch.autocast("cpu", dtype=torch.float16):
        own = Setup(Model().float(), tuple(value.float() for value in batch()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(own.model.parameters(), lr=0.1)
        for scale, wanted in ((1e6, 4.0), (1.0, 4.0)):
            x, target = (value.float() for value in batch())
            before = copy.deepcopy(own.model.state_dict())
            scaler.scale(own.ready(x * (scale if dist.get_rank() == 0 else 1.0), target)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == wanted
            after = own.model.state_dict()
            assert all(torch.equal(after[name], before[name]) for name in after) == (scale > 1)
    assert all(value.isfinite().all() for value in after.values())
    assert not own.ready.fallbacks


WORKS = (*what_models_read.WORKS, *rows())

# ---- Falls back


def evaluation_mode(setup: Setup) -> None:
    """`eval()`, with gradients."""
    setup.ready.eval()
    setup.falls_back("the module is in evaluation mode")
    setup.ready.train()


def submodule_in_evaluation_mode(setup: Setup) -> None:
    """A submodule in evaluation mode."""
    setup.model.drop.eval()
    setup.falls_back("no longer so: drop.training == True")
    setup.model.drop.train()


def dropout_changed(_setup: Setup) -> None:
    """Another dropout probability."""
    model = Plain()
    model.drop.p = 0.5
    own = Setup(model)
    model.drop.p = 0.0
    own.falls_back("no longer so: drop.p == 0.5")


def capacity_factor_changed(setup: Setup) -> None:
    """Another capacity factor, or any setting that the forward reads."""
    with changed(setup.model.layer, capacity_factor=0.5):
        setup.falls_back("no longer so: layer.capacity_factor == 1.0")


def hook_on_a_submodule(setup: Setup) -> None:
    """A forward hook on a submodule, after `optimize`."""
    with setup.model.output.register_forward_hook(lambda _module, _inputs, output: 2 * output):
        setup.falls_back("no longer so: no forward_hooks on output")


def hook_on_the_module(setup: Setup) -> None:
    """A forward hook on the module, after `optimize`."""
    with setup.model.register_forward_hook(lambda _module, _inputs, output: 2 * output):
        setup.falls_back("the hooks or the forward of Model itself")


def autocast_at_the_call(setup: Setup) -> None:
    """Autocast at the call and not at `optimize`."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        setup.falls_back("autocast is torch.bfloat16 on cpu, was off")


def autocast_at_optimize(_setup: Setup) -> None:
    """Autocast at `optimize` and not at the call."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = Setup(Plain())
    own.falls_back("autocast is off, was torch.bfloat16 on cpu")


class Dense(nn.Module):
    """x[B, S, D], target[B, S, D] -> loss, without experts; `left_out` names a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.left_out = 3
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.left_out:
                x = x + torch.tanh(layer(x))
        return (x - target).square().mean()


def one_rank_of_a_dense_model(_setup: Setup) -> None:
    """A change on one rank only, in a model without experts."""
    own = Setup(Dense())
    others = dist.get_world_size() - 1
    if dist.get_rank() == others:
        with own.model.layers[1].register_forward_hook(lambda _module, _inputs, output: 2 * output):
            own.falls_back("no longer so: no forward_hooks on layers.1")
    else:
        own.compare(*batch())
        own.compare(*batch())
    own.compare(*batch(1))


def one_rank_of_a_model_with_experts(_setup: Setup) -> None:
    """A change on one rank only, in a model with experts or FSDP: no rank runs the plan."""
    own = Setup()
    last, reason = dist.get_world_size() - 1, "no longer so: no forward_hooks on output"
    if dist.get_rank() == last:
        with own.model.output.register_forward_hook(lambda _module, _inputs, output: 2 * output):
            own.falls_back(reason)
    else:
        own.falls_back(f"rank {last}: {reason}")
    own.compare(*batch())


def layers_left_out(_setup: Setup) -> None:
    """Layers skipped independently on each rank (LayerDrop); one skipped on all ranks gets no gradient."""
    own = Setup(Dense())
    own.model.left_out = dist.get_rank()
    own.falls_back("no longer so: left_out == 3")
    own.model.left_out = 1
    own.compare_calls(lambda module: module(*batch(1)), fallbacks=1)


def layers_that_the_plan_left_out(_setup: Setup) -> None:
    """A layer that was left out at `optimize` and is used now."""
    model = Dense()
    model.left_out = 0
    own = Setup(model)
    model.left_out = 1 + dist.get_rank()
    own.falls_back("no longer so: left_out == 0")


FALLS_BACK = (*what_models_read.FALLS_BACK, *rows(WORKS))

# ---- Refused


def parameter_unfrozen(_setup: Setup) -> None:
    """A parameter that was frozen at `optimize` and is trained."""
    model = Plain()
    model.input.requires_grad_(False)
    own = Setup(model)
    model.input.weight.requires_grad_(True)
    with refused("input.weight with requires_grad=True", "call optimize() again"):
        own.ready(*batch())


def parameter_frozen(setup: Setup) -> None:
    """A parameter that is frozen after `optimize`."""
    setup.model.output.bias.requires_grad_(False)
    with refused("output.bias with requires_grad=False"):
        setup.ready(*batch())
    setup.model.output.bias.requires_grad_(True)


def submodule_replaced(setup: Setup) -> None:
    """Another submodule in the place of one."""
    with changed(setup.model, output=nn.Linear(D, D).double()), refused("another tensor as output.weight"):
        setup.ready(*batch())


def weights_tied(setup: Setup) -> None:
    """Weights that are tied after `optimize`."""
    with changed(setup.model.output, weight=setup.model.input.weight), refused("another tensor as output.w"):
        setup.ready(*batch())


def load_state_dict_assign(setup: Setup) -> None:
    """`load_state_dict(assign=True)`."""
    with restored(setup.model), refused("another tensor as ", "call optimize() again"):
        setup.model.load_state_dict(Model().state_dict(), assign=True)
        setup.ready(*batch())


def parametrized(setup: Setup) -> None:
    """A parametrization that is registered after `optimize`."""
    with restored(setup.model), refused("no output.weight"):
        nn.utils.parametrizations.weight_norm(setup.model.output)
        setup.ready(*batch())


def other_dtype(setup: Setup) -> None:
    """The model in another dtype."""
    setup.model.to(torch.bfloat16)
    with refused("input.weight with torch.bfloat16, expected torch.float64"):
        setup.ready(*(value.bfloat16() for value in batch()))
    setup.model.to(torch.float64)


def copied_pickled_and_saved(setup: Setup) -> None:
    """`copy.deepcopy`, `pickle`, `torch.save` of the whole module."""
    with refused("to be copied", "copy.deepcopy(optimized.module)"):
        copy.deepcopy(setup.ready)
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with refused("saved whole", "optimized.module.state_dict()"):
            save(setup.ready)
    assert copy.deepcopy(setup.ready.module).input.weight is not setup.model.input.weight


class WithAuxiliaryLoss(Plain):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.input.aux_loss = self.input(x).square().mean()
        return super().forward(x, target) + self.input.aux_loss


def attribute_written_in_forward(_setup: Setup) -> None:
    """A forward that writes attributes or lists."""
    with refused("a forward that writes input.aux_loss", "return the value"):
        Setup(WithAuxiliaryLoss())


def double_backward(setup: Setup) -> None:
    """`backward(create_graph=True)`."""
    with refused("create_graph=True"):
        setup.ready(*batch()).backward(create_graph=True)
    setup.model.zero_grad(set_to_none=True)


def refused_where_sums_are(*words: str) -> contextlib.AbstractContextManager[None]:
    """Refused on several ranks; one rank has all of a gradient."""
    return refused(*words) if dist.get_world_size() > 1 else contextlib.nullcontext()


def parameter_used_outside(setup: Setup) -> None:
    """A parameter of the module in the loss outside of it."""
    weight = setup.model.output.weight
    for penalty in (weight, weight + setup.model.input.weight):
        with refused_where_sums_are(
            "gradient of ", "output.weight", "a part from outside the optimized step"
        ):
            setup.compare_calls(lambda module, w=penalty: module(*batch()) + w.square().sum())
    weight.square().sum().backward()  # nothing of the step
    setup.compare(*batch())


class WithWeight(Plain):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, target), self.output.weight


def parameter_returned(_setup: Setup) -> None:
    """A parameter that the forward returns, in the loss."""
    own = Setup(WithWeight())
    own.compare_calls(lambda module: module(*batch())[0])
    with refused_where_sums_are("gradient of output.weight", "a part from outside the optimized step"):
        own.compare_calls(lambda module: sum(value.square().sum() for value in module(*batch())))


def clipping_by_torch(_setup: Setup) -> None:
    """`torch.nn.utils.clip_grad_norm_`, whose norm is another one on each rank, at the next comparison."""
    own = Setup(compare_every=1)
    with refused_where_sums_are("parameter input.weight after 2 calls", "lancet_kernels.clip_gradients"):
        for number in range(3):
            own.ready(*batch(number)).backward()
            nn.utils.clip_grad_norm_(own.model.parameters(), 0.01)
            torch.optim.SGD(own.model.parameters(), lr=0.1).step()
            own.model.zero_grad()


def reentrant_checkpoint_without_plan(_setup: Setup) -> None:
    """Activation checkpointing with `use_reentrant=True` inside a module that runs without its plan."""
    x, target = batch()
    x.requires_grad_(True)
    # Gradients of experts are not summed, but divided.
    experts_alone = Tied(use_reentrant=True).requires_grad_(False)
    experts_alone.layers[0].w1.requires_grad_(True)
    for model, reduced in ((Tied(use_reentrant=True), "sum"), (experts_alone, "mean")):
        own = Setup(model, (x, target), reduce_gradients=reduced)
        own.ready.eval()
        with refused_where_sums_are("gradient of ", "use_reentrant=False"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own.compare_calls(lambda module: module(x, target), fallbacks=1)


def ranks_that_do_different_things(setup: Setup) -> None:
    """A call without gradients, in `no_sync`, or refused, on one rank only; other arguments of `optimize`."""
    if dist.get_world_size() == 1:
        return
    is_last = dist.get_rank() == 1
    with refused("a call on rank(s) 0 and a call without gradients"), torch.set_grad_enabled(not is_last):
        setup.ready(*batch())
    alone = setup.ready.no_sync() if is_last else contextlib.nullcontext()
    with refused("a call on rank(s) 0 and a call in no_sync() on rank(s) 1"), alone:
        setup.ready(*batch())
    with refused("inputs of the optimized Model" if is_last else "an error on rank 1: inputs of the"):
        setup.ready(*batch()[is_last:])
    with refused("trials=5 on rank 0 and 3 on rank 1"):
        optimized(setup.model, batch(), trials=3 if is_last else 5)
    setup.compare(*batch())


class TwoLayers(Model):
    """With a second MoE layer; `left_out` says which of them does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.left_out = copy.deepcopy(self.layer), 2

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for i, layer in enumerate((self.layer, self.second)):
            if i != self.left_out:
                x = x + layer(torch.tanh(self.input(x)))
        return (self.output(x) - target).square().mean()


def moe_layers_left_out(_setup: Setup) -> None:
    """A different MoE layer skipped on each rank."""
    own = Setup(TwoLayers())
    own.model.left_out = dist.get_rank()
    if dist.get_world_size() == 1:
        own.falls_back("no longer so: left_out == 2")
        return
    with refused("on rank 0", "on rank 1", "another one", "the same MoE layers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own.ready(*batch())


def missing_input(setup: Setup) -> None:
    """An input is missing."""
    with refused("missing a required argument: 'target'", "forward(x: "):
        setup.ready(batch()[0])


def data_parallel_around(setup: Setup) -> None:
    """DistributedDataParallel around a plan that sums gradients."""
    if dist.get_world_size() == 1:
        setup.compare_calls(lambda module: DistributedDataParallel(module)(*batch()))
        return  # there is nothing to sum
    with refused("DistributedDataParallel around the optimized Model", "reduce_gradients=False"):
        DistributedDataParallel(setup.ready)(*batch())


def data_parallel_that_sums_experts(_setup: Setup) -> None:
    """DistributedDataParallel that would average different experts."""
    own = Setup(reduce_gradients=False)
    wrapped = DistributedDataParallel(own.ready)
    if dist.get_world_size() == 1:
        wrapped(*batch())  # one rank has all experts
        return
    with refused("layer.w1 among the parameters that it averages", "lancet_kernels.ddp"):
        wrapped(*batch())


def data_parallel_inside(_setup: Setup) -> None:
    """`optimize` of a model in DistributedDataParallel, or behind `prepare_data_parallel`."""
    with refused("DistributedDataParallel around it", "give optimize() the plain model"):
        optimized(DistributedDataParallel(Model()), batch())
    model = Model()
    prepare_data_parallel(model)
    with refused_where_sums_are("gradient of layer.w1: got the average of ddp(model)", "leave these calls"):
        optimized(model, batch())


def experts_sharded_as_replicated(_setup: Setup) -> None:
    """`fully_shard` of experts over ranks that hold different ones."""
    model, ranks = Model(), dist.get_world_size()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    if ranks == 1:
        optimized(model, batch())
        return
    with refused(f"layer.w1 sharded over {ranks} ranks", "lancet_kernels.fsdp"):
        optimized(model, batch())


def fully_sharded_after(setup: Setup) -> None:
    """`fully_shard` after `optimize`."""
    with restored(setup.model), refused("another tensor as output.weight", "call optimize() again"):
        fully_shard(setup.model.output, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        setup.ready(*batch())


class Around(nn.Module):
    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.step(*inputs)


def fully_sharded_around(_setup: Setup) -> None:
    """`fully_shard` around the optimized module."""
    own = Setup()
    outer, experts = Around(own.ready), set(expert_parameters(own.model))
    fully_shard(outer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params=experts)
    with refused("another tensor as input.weight"):
        outer(*batch())


def tensor_parallel(_setup: Setup) -> None:
    """Parameters that are DTensors (tensor parallel)."""
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.output.weight = nn.Parameter(distribute_tensor(model.output.weight.detach(), mesh, [Shard(0)]))
    with refused("output.weight as a DTensor"):
        optimized(model, batch())


class Words(nn.Module):
    """id[B, S], target[B, S, D] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, D, sparse=True)

    def forward(self, word: Tensor, target: Tensor) -> Tensor:
        return (self.table(word) - target).square().mean()


def sparse_embedding(_setup: Setup) -> None:
    """`nn.Embedding(sparse=True)`, whose gradient would be summed."""
    inputs = torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, D)
    if dist.get_world_size() == 1:
        step = optimized(Words(), inputs)
        step(*inputs).backward()
        assert step.module.table.weight.grad.is_sparse
        return  # there is nothing to sum
    with refused("gradient of table.weight: got a tensor of layout torch.sparse_coo", "sparse=False"):
        optimized(Words(), inputs)


def no_parameters(_setup: Setup) -> None:
    """A module without parameters, or with those of `torch.inference_mode`."""
    with refused("model MSELoss: got no parameters"):
        optimized(nn.MSELoss(), batch())
    with torch.inference_mode():
        model = Model()
    with refused("input.weight as a tensor of torch.inference_mode()"):
        optimized(model, batch())


def hooks_on_parameters_of_pairs(_setup: Setup) -> None:
    """Gradient hooks on parameters, with `strategy="microbatches"`."""
    model = Model()
    model.input.weight.register_hook(lambda gradient: 3 * gradient)
    with refused("a hook on input.weight", "use another strategy"):
        optimized(model, batch(), "microbatches", accumulate=2)


REFUSED = (*what_models_read.REFUSED, *rows((*WORKS, *FALLS_BACK)))

# They plan several steps or a large one, and other tests of the default run are on the same subjects.
SLOW = """
    adapters_of_experts batches_of_other_sizes checkpointed_blocks checkpointed_ties clipping
    clipping_by_torch data_parallel_that_sums_experts data_parallel_that_sums_alone frozen_below_adapters
    fully_sharded fully_sharded_around gradients_of_the_mean hooks_on_parameters_of_pairs
    infinity_and_a_grad_scaler layers_that_the_plan_left_out moe_layers_left_out no_sync
    one_rank_of_a_model_with_experts overflow_in_float16 padded_batches
    pairs_with_a_smaller_batch_on_a_rank part_of_a_layer_trained reentrant_checkpoint_without_plan
    reentrant_checkpoints_that_are_tried selective_checkpointing several_microbatches tied_weights
""".split()

ROWS = {row.__name__: row for row in (*WORKS, *FALLS_BACK, *REFUSED)}


def test_every_function_of_a_setup_is_a_row() -> None:
    own = {n: f for n, f in globals().items() if isinstance(f, FunctionType) and f.__module__ == __name__}
    first = {name: next(iter(inspect.signature(f).parameters), "") for name, f in own.items()}
    assert {name for name, p in first.items() if p in ("setup", "_setup")} <= ROWS.keys()


def rows_on_rank(names: list[str]) -> dict[str, str]:
    """What is wrong with each of these rows, "" if nothing is. A row that fails must not end the others."""
    setup, found = Setup(strategy="lancet"), {}
    assert setup.ready.plan.ranges or dist.get_world_size() == 1
    for name, row in ((name, ROWS[name]) for name in names):
        fallbacks = setup.ready.fallbacks.total()
        try:
            row(setup)
            assert row not in WORKS or setup.ready.fallbacks.total() == fallbacks
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            setup = Setup(strategy="lancet")
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def wrong(pool, request) -> Callable[[str, int], list[str]]:
    """(row, number of ranks) -> what is wrong with it, by rank. When the first is asked for, all rows of the
    session with so many ranks run."""

    @cache
    def on_ranks(ranks: int) -> list[dict[str, str]]:
        tests = (item for item in request.session.items if item.module is request.module)
        asked = [test.callspec.params for test in tests if hasattr(test, "callspec")]
        names = [one["row"] for one in asked if one["ranks"] == ranks]
        return pool.run(rows_on_rank, names, ranks=ranks, timeout_s=10.0 * (1 + len(names)))

    return lambda row, ranks: [found[row] for found in on_ranks(ranks)]


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        # On two ranks by default, if it is not slow.
        pytest.param(row, ranks, marks=[pytest.mark.long] * (ranks == 1 or row in SLOW))
        for row in ROWS
        for ranks in (1, 2)
    ],
)
def test_row(wrong, row, ranks) -> None:
    assert wrong(row, ranks) == [""] * ranks
