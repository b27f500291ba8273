"""What a trainer does to a module around `optimize`: it works, falls back to the plain module, or is refused.

Each row of the documentation's support matrix is a test here, described by its docstring. All rows of one
number of ranks run in one call of the pool; loss and all gradients are compared with those of the plain
module.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lancet_kernels import MoELayer, OptimizedModule, ddp, expert_parameters, moe_losses
from lancet_kernels.errors import UserError
from tests.optimized import BOUND, optimized
from tests.planned_steps import Outcome, gradients, sum_over_ranks

B, S, D = 4, 3, 8


class Model(nn.Module):
    """x[B, S, D], target[B, S, D] -> loss. Dropout does nothing unless a test says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = nn.Linear(D, D)
        self.layer = MoELayer(D, 12, 4, top_k=2, gate="topk", capacity_factor=1.0)
        self.drop = nn.Dropout(0.0)
        self.output = nn.Linear(D, D)
        self.double()
        for parameter in self.parameters():
            parameter.data *= 3

    def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        y, sums = self.layer(torch.tanh(self.input(x)), return_sums=True)
        loss = (self.output(self.drop(x + y)) - target).square().mean()
        return scale * loss + 0.1 * moe_losses([sums]).balance.mean()


def batch(number: int = 0, size: int = B) -> tuple[Tensor, Tensor]:
    """Another one on every rank."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return tuple(torch.randn(size, S, D, dtype=torch.float64, generator=generator) for _ in range(2))


class Setup:
    """A model with its optimized module, and how what they give is compared."""

    def __init__(
        self, model: nn.Module | None = None, inputs: object = None, strategy: str = "none", **options: object
    ) -> None:
        self.model = Model() if model is None else model
        self.ready: OptimizedModule = optimized(self.model, inputs or batch(), strategy, **options)

    def compare(self, *inputs: object, **by_name: object) -> None:
        """Loss and gradients of the optimized module are those of the plain one."""
        self.compare_calls(lambda module: module(*inputs, **by_name))

    def compare_calls(self, loss_of: Callable[[nn.Module], Tensor]) -> None:
        """The same for any call of either."""
        plain = outcome(self.model, loss_of(self.model), reduced=False)
        planned = outcome(self.model, loss_of(self.ready), reduced=True)
        assert plain.gradients
        assert planned.distance(plain) < BOUND

    def falls_back(self, reason: str, *inputs: object, **by_name: object) -> None:
        """It gives what the plain module gives, counts that, and says so once."""
        before = self.ready.fallbacks.total()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                self.compare(*(inputs or () if by_name else inputs or batch()), **by_name)
        found = [str(w.message) for w in said if "runs without its plan" in str(w.message)]
        assert len(found) == 1, found
        assert f"runs without its plan: {reason}" in found[0]
        assert self.ready.fallbacks[reason] == 2
        assert self.ready.fallbacks.total() == before + 2


def outcome(model: nn.Module, loss: Tensor, reduced: bool) -> Outcome:
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return Outcome([loss.detach()], found if reduced else sum_over_ranks(model, found))


@contextlib.contextmanager
def changed(thing: object, **values: object) -> Iterator[None]:
    """Attributes with other values, for a while."""
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards every submodule has the class, parameters, submodules and hooks that it had."""
    kept = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
    before = [(m, type(m), {name: dict(getattr(m, name)) for name in kept}) for m in model.modules()]
    try:
        yield
    finally:
        for module, kind, values in before:
            module.__class__ = kind
            for name, value in values.items():
                getattr(module, name).clear()
                getattr(module, name).update(value)


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
    own = Setup(inputs=(wide[:, :-1], wide[:, 1:]))
    own.compare(wide[:, :-1], wide[:, 1:])
    own.compare(*batch())
    assert not own.ready.fallbacks


def the_same_tensor_twice(setup: Setup) -> None:
    """One tensor as two inputs."""
    x, _ = batch()
    setup.compare(x, x)
    own = Setup(inputs=(x, x))
    own.compare(*batch(1))
    assert not own.ready.fallbacks


def example_inputs_in_a_dict(_setup: Setup) -> None:
    """Example inputs in a dict, numbers among them."""
    x, target = batch()
    own = Setup(inputs={"target": target, "x": x, "scale": 2.0})
    own.compare(x, scale=2.0, target=target)
    own.compare(x, target, 2.0)
    assert not own.ready.fallbacks
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
    handle = setup.model.input.weight.register_hook(lambda gradient: 3 * gradient)
    setup.compare(*batch())
    handle.remove()


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
    """`ddp(step)` around a plan with `reduce_gradients=False`: averages of what ranks give."""
    own, plain = Setup(reduce_gradients=False), Model()
    wrapped = ddp(own.ready)
    for number in range(2):  # the second time in other buckets
        got = outcome(own.model, wrapped(*batch(number)), reduced=True)
        wanted = outcome(plain, plain(*batch(number)), reduced=False)
        wanted.gradients = {name: g / dist.get_world_size() for name, g in wanted.gradients.items()}
        assert got.distance(wanted) < BOUND
    assert not own.ready.fallbacks


def batches_of_other_sizes(_setup: Setup) -> None:
    """Other ones on every rank, down to one that is smaller than the number of parts, with a plan that cuts.

    Each is captured once; rank 0 meets one size, rank 1 all of them.
    """
    own = Setup(strategy="lancet")
    assert own.ready.plan.ranges
    for number, size in enumerate((B - 1, 1, B - 1)):
        own.compare(*batch(number, B - 1 if dist.get_rank() == 0 else size))
    assert not own.ready.fallbacks
    assert len(own.ready._shapes._others) == (1 if dist.get_rank() == 0 else 2)


WORKS = (
    inputs_by_name,
    batches_of_other_sizes,
    sliced_and_transposed_inputs,
    sliced_example_inputs,
    the_same_tensor_twice,
    example_inputs_in_a_dict,
    retain_graph,
    activation_checkpointing,
    torch_compile_around,
    hooks_on_parameters,
    updates_and_load_state_dict,
    attributes_that_nobody_reads,
    without_gradients,
    data_parallel_that_sums_alone,
)

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
    model = Model()
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
    handle = setup.model.output.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    setup.falls_back("no longer so: no forward_hooks on output")
    handle.remove()


def hook_on_the_module(setup: Setup) -> None:
    """A forward hook on the module, after `optimize`."""
    handle = setup.model.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    setup.falls_back("the hooks or the forward of Model itself")
    handle.remove()


def autocast_at_the_call(setup: Setup) -> None:
    """Autocast at the call and not at `optimize`."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        setup.falls_back("autocast is torch.bfloat16 on cpu, was off")


def autocast_at_optimize(_setup: Setup) -> None:
    """Autocast at `optimize` and not at the call."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = Setup()
    own.falls_back("autocast is off, was torch.bfloat16 on cpu")


FALLS_BACK = (
    evaluation_mode,
    submodule_in_evaluation_mode,
    dropout_changed,
    capacity_factor_changed,
    hook_on_a_submodule,
    hook_on_the_module,
    autocast_at_the_call,
    autocast_at_optimize,
)

# ---- Refused


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """One line, with these words in it, before a rank communicates."""
    try:
        yield
    except UserError as error:
        message = str(error)
    else:
        raise AssertionError("no error")
    assert "\n" not in message
    for word in words:
        assert word in message, message


def parameter_unfrozen(_setup: Setup) -> None:
    """A parameter that was frozen at `optimize` and is trained."""
    model = Model()
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


class WithAuxiliaryLoss(Model):
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


def a_rank_that_falls_back_alone(setup: Setup) -> None:
    """A change on one rank only."""
    if dist.get_world_size() == 1:
        return
    with refused("rank(s) 1 running without the plan", "see the warning"):
        p = 0.5 * dist.get_rank()
        with changed(setup.model.drop, p=p), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            setup.ready(*batch())


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
    """`optimize` of a model in DistributedDataParallel."""
    with refused("DistributedDataParallel around it", "give optimize() the plain model"):
        optimized(DistributedDataParallel(Model()), batch())


def fully_sharded_before(_setup: Setup) -> None:
    """FSDP before `optimize`."""
    model = Model()
    fully_shard(model.output, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with refused("output sharded by FSDP", "leave FSDP out"):
        optimized(model, batch())


def fully_sharded_after(setup: Setup) -> None:
    """FSDP after `optimize`."""
    with restored(setup.model), refused("output sharded by FSDP", "leave FSDP out"):
        fully_shard(setup.model.output, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        setup.ready(*batch())


class Around(nn.Module):
    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.step(*inputs)


def fully_sharded_around(_setup: Setup) -> None:
    """FSDP around the optimized module."""
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


REFUSED = (
    parameter_unfrozen,
    parameter_frozen,
    submodule_replaced,
    weights_tied,
    load_state_dict_assign,
    parametrized,
    other_dtype,
    copied_pickled_and_saved,
    attribute_written_in_forward,
    double_backward,
    a_rank_that_falls_back_alone,
    missing_input,
    data_parallel_around,
    data_parallel_that_sums_experts,
    data_parallel_inside,
    fully_sharded_before,
    fully_sharded_after,
    fully_sharded_around,
    tensor_parallel,
)

RANKS = (pytest.param(1, marks=pytest.mark.long), 2)

ROWS = {row.__name__: row for row in (*WORKS, *FALLS_BACK, *REFUSED)}


def rows_on_rank() -> dict[str, str]:
    """What is wrong with each row, "" if nothing is. A row that fails must not end the others."""
    setup, found = Setup(strategy="lancet"), {}
    assert setup.ready.plan.ranges or dist.get_world_size() == 1
    for name, row in ROWS.items():
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
def rows() -> dict[int, list[dict[str, str]]]:
    """What rows gave: number of ranks -> by rank -> by name."""
    return {}


def gave(pool, rows: dict, row: str, ranks: int) -> list[str]:
    """What is wrong with a row, by rank; all rows run when the first is asked for."""
    if ranks not in rows:
        rows[ranks] = pool.run(rows_on_rank, ranks=ranks, timeout_s=300)
    return [found[row] for found in rows[ranks]]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("row", [row.__name__ for row in WORKS])
def test_works(pool, rows, row, ranks) -> None:
    assert gave(pool, rows, row, ranks) == [""] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("row", [row.__name__ for row in FALLS_BACK])
def test_falls_back(pool, rows, row, ranks) -> None:
    assert gave(pool, rows, row, ranks) == [""] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("row", [row.__name__ for row in REFUSED])
def test_refused(pool, rows, row, ranks) -> None:
    assert gave(pool, rows, row, ranks) == [""] * ranks
