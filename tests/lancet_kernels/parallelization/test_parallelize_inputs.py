"""What `parallelize` takes beside the models of the paper, and what it refuses, in one line."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lancet_kernels import Dropout, MoELayer, UserError, parallelize, set_routing_step
from lancet_kernels.ops.comm.groups import group_name
from tests.grids import few_of
from tests.lancet_kernels.parallelization.test_parallelize import cluster, distance, gradient_errors
from tests.setups import refused


class Plain(nn.Module):
    """x[B, D] -> loss."""

    def __init__(self, extra: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(8, 16), nn.Linear(16, 8), extra

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.down(functional.relu(self.up(x)))).square().mean()


class Surprise(torch.autograd.Function):
    """Doubles, and says it had multiplied by seven."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 7 * gradient


class Mixed(nn.Module):
    """Tied and frozen parameters, buffers, one of them not saved, inputs by name, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unread = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("shift", torch.rand(8), persistent=False)

    def forward(self, x: Tensor, target: Tensor, *, weight: int = 2) -> dict[str, Tensor]:
        constant = torch.tensor([0.5, 2.0], dtype=x.dtype).repeat(4)
        y = self.second(torch.tanh(self.first(x)) * self.scale + self.shift) * self.frozen * constant
        return {
            "loss": weight * functional.cross_entropy(y, target, ignore_index=1),
            "best": y.argmax(1),
            "y": y,
        }


def mixed_errors() -> list[float]:
    torch.manual_seed(1)
    model = Mixed().double()
    step = None
    errors = []
    for target in (torch.tensor([0, 1, 2, 3, 1, 1, 6, 7]), torch.arange(8)):
        batch = {"target": target, "x": torch.randn(8, 8, dtype=torch.float64), "weight": 3}
        step = step or parallelize(copy.deepcopy(model), batch, cluster=cluster(100.0))
        expected, found = model(**batch), step(**batch)
        assert expected.keys() == found.keys()
        assert torch.equal(expected["best"], found["best"])
        errors += [distance(found[k], expected[k]) for k in ("loss", "y")]
        for result in (expected, found):
            (result["loss"] + result["y"].square().sum()).backward()
        for module in (model, step):
            for parameter in (module.unread, module.frozen):
                parameter.grad = torch.zeros_like(parameter)
        errors += gradient_errors(step, model).values()
        step.zero_grad(), model.zero_grad()
    assert list(step.state_dict()) == list(model.state_dict())
    assert step.state_dict()["second.weight"].shape == (8, 8)
    trained = {n for n, p in step.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if p.requires_grad}
    state = {n: t + 1 for n, t in model.state_dict().items()}
    step.load_state_dict(state)
    model.load_state_dict(state)
    batch["x"] = batch["x"] + 1
    return [*errors, distance(step(**batch)["y"], model(**batch)["y"])]


class Read(nn.Module):
    """Reads a buffer, plain tensors, settings and a module that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.factor = nn.Dropout(0.0), 2.0
        self.plain, self.listed = torch.rand(8).double(), [torch.rand(16).double()]
        self.register_buffer("shift", torch.rand(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.up(x * self.plain + self.shift)) * self.listed[0] * self.factor
        return self.down(torch.tanh(y)).square().mean()


def read_errors() -> list[float]:
    """Errors of loss and gradients while tensors are replaced; other changes are refused."""
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    given = Read()
    model = copy.deepcopy(given)
    with torch.inference_mode():
        step = parallelize(given, (x,), strategy="data parallel", cluster=cluster(1.0))
    errors = []

    def compare() -> None:
        expected, found = model(x), step(x)
        expected.backward()
        found.backward()
        errors.extend([distance(found, expected), *gradient_errors(step, model).values()])
        step.zero_grad(), model.zero_grad()

    def check(said: str, thing: object, attribute: str, value: object) -> None:
        before = getattr(thing, attribute)
        setattr(thing, attribute, value)
        with refused(said):
            step(x)
        setattr(thing, attribute, before)

    compare()
    for one in (given, model):
        one.plain, one.listed[0] = torch.full((8,), 0.5).double(), torch.full((16,), 1.5).double()
    compare()
    for one in (given, model):
        one.plain.mul_(2)
    for one in (step, model):
        one.shift = torch.full((8,), 0.25).double()
    compare()
    check("no longer so: factor == 2.0", given, "factor", 3.0)
    check("no longer so: drop.p == 0.0", given.drop, "p", 0.5)
    check("no longer so: drop.training == True", given.drop, "training", False)
    check("evaluation mode of up, was training mode", step.up, "training", False)
    of_parameters = "parameters of the parallelized Read: got another tensor as"
    check(f"{of_parameters} shift", given, "shift", torch.ones(8).double())
    check(f"{of_parameters} up.weight", given, "up", nn.Linear(8, 16).double())
    check("no longer so: tensor 'plain' size mismatch", given, "plain", torch.ones(1).double())
    with torch.autocast("cpu", torch.bfloat16), refused("autocast is torch.bfloat16 on cpu, was off"):
        step(x)
    hooks = (given.up, "no longer so: no forward_hooks on up"), (step.up, "hooks of up, which is not called")
    for module, said in hooks:
        hook = module.register_forward_hook(lambda _module, _inputs, output: 2 * output)
        with refused(said):
            step(x)
        hook.remove()
    compare()
    return errors


def test_tensors_that_are_replaced_and_settings_that_are_changed(pool):
    for errors in pool.run(read_errors, timeout_s=240):
        assert max(errors) < 1e-12


def kept_and_changed() -> tuple[float, bool]:
    """Under autocast: the error of the loss; is the model kept by what was made of it? A sharded parameter
    that is changed in the model is refused."""
    torch.manual_seed(1)
    model, x = Plain(), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        step = parallelize(model, (x,), cluster=cluster(1000.0))
        error = distance(step(x), model(x))
    assert any(form.is_cut for form in step.forms.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        with refused("another value of up.weight in the model, of which this module has its own part"):
            step(x)
        watched = ref(model)
        del model, parameter
        gc.collect()
        step(x).backward()
    return error, watched() is not None


@pytest.mark.long
def test_the_whole_model_is_not_kept(pool):
    for error, kept in pool.run(kept_and_changed, timeout_s=120):
        assert error < 1e-2
        assert not kept


def dropout_errors() -> list[float]:
    """Errors of the loss and the gradients, in two training steps."""
    torch.manual_seed(1)
    model, x = Plain(Dropout(0.4, site=1)).double(), torch.randn(8, 8, dtype=torch.float64)
    step = parallelize(sharded := copy.deepcopy(model), (x,), strategy="data parallel", cluster=cluster(1.0))
    model.extra._group = ""  # as on one device
    errors = []
    for number in range(2):
        for module in (model, sharded):
            set_routing_step(module, number)
        expected, found = model(x), step(x)
        expected.backward()
        found.backward()
        errors += [distance(found, expected), *gradient_errors(step, model).values()]
        step.zero_grad(), model.zero_grad()
    return errors


class Assigned(nn.Module):
    """Writes into a slice; groups channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.GroupNorm(2, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        shifted = torch.zeros_like(y)
        shifted[:, 1:] = y[:, :-1]
        return self.down(self.norm(y + shifted)).square().mean()


def assigned_errors() -> list[float]:
    torch.manual_seed(1)
    model, x = Assigned().double(), torch.randn(8, 8, dtype=torch.float64)
    step = parallelize(copy.deepcopy(model), (x,), copies=1, cluster=cluster(1000.0))
    expected, found = model(x), step(x)
    expected.backward()
    found.backward()
    return [distance(found, expected), *gradient_errors(step, model).values()]


@pytest.mark.parametrize("errors_of", few_of([mixed_errors, dropout_errors, assigned_errors]))
def test_results_and_gradients_are_those_of_one_device(pool, errors_of):
    """Tied and frozen parameters, buffers, several results; dropout that is keyed by token; assignments."""
    for errors in pool.run(errors_of, timeout_s=120):
        assert max(errors) < 1e-12


def saved_and_measured(folder: str) -> tuple[list[float], str]:
    """A strategy for costs measured here, saved and used again; and with one microbatch."""
    torch.manual_seed(1)
    model, x = Plain().double(), torch.randn(8, 8, dtype=torch.float64)
    expected = model(x)
    file, times = Path(folder) / "strategy.json", Path(folder) / "times.json"
    first = parallelize(model, (x,), times=times)
    if dist.get_rank() == 0:
        first.strategy.save(file)
    dist.barrier()
    again = parallelize(model, (x,), strategy=file, times=times)
    assert again.strategy == first.strategy
    alone = parallelize(model, (x,), copies=1, strategy="data parallel", cluster=cluster(1.0))
    return [distance(step(x), expected) for step in (first, again, alone)], first.explain()


@pytest.mark.long
def test_a_measured_strategy_is_saved_and_used_again(pool, tmp_path):
    for errors, text in pool.run(saved_and_measured, str(tmp_path), timeout_s=240):
        assert max(errors) < 1e-12
        assert "up.weight" in text
        assert "primals" not in text


def refusals() -> None:
    """What cannot be, and what is said of it."""
    x = torch.randn(8, 8)
    links = cluster(1.0)
    wrong = parallelize(Plain(), (x,), cluster=links)

    def check(said: str, model: nn.Module, batch: Tensor = x, **options: object) -> None:
        with refused(said):
            parallelize(model, (batch,), cluster=links, **options)

    by_hand = {"strategy": "data parallel"}
    check("got a batch of 7, expected a multiple of 2", Plain(), x[:7])
    check("nothing can be cut along the batch", Plain(), x[:1])
    check("expected microbatches that 2 ranks divide", Plain(), x[:2], **by_hand)
    check("got no parameter [experts, ., .]", Plain(), strategy="expert parallel")
    names = "parallel, expert parallel, a ShardingStrategy, or the file of one"
    check(names, Plain(), strategy="zero")
    check("got one for 4 ranks, expected one for 2", Plain(), strategy=replace(wrong.strategy, ranks=4))
    check("expected the program it was searched for", Plain(), x[:4], strategy=wrong.strategy)
    check("capture of Plain: got", Plain(lambda y: y if y.sum() > 0 else -y))
    cut = "a forward that does not run on a part of its batch (list index out of range)"
    check(cut, Plain(lambda y: y.chunk(4)[3]), torch.randn(8, 8))
    check("random numbers depend on the sharding", Plain(lambda y: functional.dropout(y, 0.5)))
    check("changes its buffers", nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    check("gradients that are not those of its forward's ops", Plain(Surprise.apply))
    group = group_name(None)
    summed = Plain(lambda y: torch.ops.lancet.all_reduce(y, group))
    check("(_c10d_functional.all_reduce), an op of several ranks", summed)
    weight = nn.Parameter(torch.ones(8))
    check("which requires a gradient and is not registered", Plain(lambda y: y * weight))
    check("model Tanh: got no parameters", nn.Tanh())
    sparse = nn.Sequential(nn.Embedding(8, 8, sparse=True), Plain())
    check("gradient of 0.weight: got a tensor of layout torch.sparse_coo", sparse, torch.arange(8), **by_hand)
    check("got 1 MoELayer", nn.Sequential(MoELayer(8, 16, 4)))
    check("got another one on rank(s) 1", Plain(), x[: 4 + 2 * dist.get_rank()])
    for copies in (0, 2.0):
        check(f"copies of parallelize: got {copies}, expected how many", Plain(), copies=copies)
    check("no strategy within 1e-09 GB a device", Plain(), memory_gb=1e-9)
    unused = "memory_gb of parallelize: got one, with strategy data parallel, expected none"
    check(unused, Plain(), memory_gb=1.0, **by_hand)
    with refused("got inputs of another shape, expected what parallelize() was given"):
        wrong(x[:4])
    with refused("got evaluation mode, was training mode"):
        wrong.eval()(x)
    with refused("4 parameters that are not of this module"):
        wrong.optimizer_state_dict(torch.optim.SGD(Plain().parameters(), 0.1))


@pytest.mark.long
def test_what_cannot_be_is_refused_in_one_line(pool):
    pool.run(refusals, timeout_s=300)


def test_no_process_group():
    with pytest.raises(UserError, match="got no process group, expected one"):
        parallelize(Plain(), (torch.randn(8, 8),))
