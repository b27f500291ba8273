"""DistributedDataParallel around models with MoE layers, against one process with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lancet_kernels import Groups, MoELayer, UserError, ddp, fsdp, prepare_data_parallel
from tests.lancet_kernels.layer.test_expert_groups import (
    RANKS,
    Case,
    Step,
    batch,
    distances,
    expert_group,
    one_process,
)
from tests.optimized import BOUND
from tests.refusals import refusal


def train_with_ddp(size: int) -> dict[str, float]:
    """Three steps and a micro-batch each way; the distance of the last one."""
    case = Case()
    step = Step(case, expert_group(size), 1)
    reference = one_process(case)
    mine = batch().chunk(RANKS)[dist.get_rank()]
    around = ddp(step, bucket_cap_mb=0.001)
    for _ in range(2):
        around.zero_grad()
        loss, _ = around(mine)
        loss.backward()
    once = distances(step, loss / RANKS, reference)
    # A second backward adds to the gradients, as it does everywhere.
    around(mine)[0].backward()
    for parameter in step.parameters():
        parameter.grad /= 2
    twice = distances(step, loss / RANKS, reference)
    return once | {f"twice {name}": distance for name, distance in twice.items()}


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.long)])
def test_gradients_under_ddp_equal_one_process(pool, size):
    for found in pool.run(train_with_ddp, size, ranks=RANKS, timeout_s=120):
        assert not {name: distance for name, distance in found.items() if distance > BOUND}


def wrapped_anew() -> float:
    """The largest difference of a gradient between a model that was wrapped twice and one that was once."""
    mine, gradients = batch().chunk(RANKS)[dist.get_rank()], []
    for times in (1, 2):
        step = Step(Case(), dist.group.WORLD, 1)
        for _ in range(times):
            around = ddp(step)
        around(mine)[0].backward()
        gradients.append([parameter.grad for parameter in step.parameters()])
    return max(float((once - twice).abs().max()) for once, twice in zip(*gradients, strict=True))


def test_gradients_are_averaged_once_where_a_model_is_wrapped_anew(pool):
    assert pool.run(wrapped_anew, ranks=RANKS) == [0.0] * RANKS


def without_averages(is_frozen: bool) -> tuple[str, float]:
    """What is refused of a copy behind `ddp`, or of one whose experts were frozen then, once they train; and
    how the gradients of a copy differ that is wrapped, too."""
    mine, step = batch().chunk(RANKS)[dist.get_rank()], Step(Case(), dist.group.WORLD, 1)
    ddp(step)(mine)[0].backward()
    other, wrapped = (copy.deepcopy(step) for _ in range(2))
    experts = [p for name, p in other.named_parameters() if "feed_forward.w" in name]
    if is_frozen:
        for parameter in experts:
            parameter.requires_grad_(False)
        prepare_data_parallel(other)
    around = DistributedDataParallel(other)
    with torch.set_grad_enabled(is_frozen):
        around(mine)  # needs no averages
    for parameter in experts:
        parameter.requires_grad_(True)
    told = refusal(lambda: around(mine))
    wrapped.zero_grad()
    ddp(wrapped)(mine)[0].backward()
    pairs = zip(step.parameters(), wrapped.parameters(), strict=True)
    return told, max(float((once.grad - own.grad).abs().max()) for once, own in pairs)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_experts_without_averages_are_refused(pool, is_frozen):
    for told, difference in pool.run(without_averages, is_frozen, ranks=RANKS):
        assert told.startswith("gradient of model.blocks.1.feed_forward.w1: got no average over ranks")
        assert difference == 0.0


def with_a_rank_without_tokens() -> float:
    """The largest difference of the experts' gradients between float64, where layers run op by op, and
    float32."""
    layer, rank = MoELayer(8, 8, 4, capacity_factor=None, groups=expert_group(2)), dist.get_rank()
    x = torch.randn(4 * RANKS, 8)[4 * rank : 4 * rank + 4 * (rank != 1)]
    by_dtype = []
    for dtype in (torch.float64, torch.float32):
        around = ddp(copy.deepcopy(layer).to(dtype))
        around(x.to(dtype)).sum().backward()
        by_dtype.append([parameter.grad for parameter in (around.module.w1, around.module.w2)])
    return max(float((exact - got).abs().max()) for exact, got in zip(*by_dtype, strict=True))


def test_ranks_sum_the_same_gradients_where_one_has_no_tokens(pool):
    assert max(pool.run(with_a_rank_without_tokens, ranks=RANKS)) < 1e-5


def wrapped_for_fewer_ranks() -> str:
    """As a framework does that knows of no expert ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    model = nn.Sequential(nn.Linear(8, 8), MoELayer(8, 8, 4, groups=mesh))
    prepare_data_parallel(model)
    around = DistributedDataParallel(model, process_group=mesh["replica"].get_group())
    return refusal(lambda: around(torch.randn(4, 8)))


def test_a_wrapper_that_averages_over_fewer_ranks_is_refused(pool):
    for told in pool.run(wrapped_for_fewer_ranks, ranks=4):
        assert told.startswith("process group of DistributedDataParallel: got ranks [")
        assert "expected all that have different tokens: [0, 1, 2, 3]" in told


def wrap_without_ddp() -> str:
    step = Step(Case(), dist.group.WORLD, 1)
    return refusal(lambda: DistributedDataParallel(step)(batch()[:4]))


def test_distributed_data_parallel_that_takes_experts_is_refused(pool):
    for text in pool.run(wrap_without_ddp):
        assert text.startswith(
            "DistributedDataParallel around an MoELayer: got model.blocks.1.feed_forward.w1"
        )
        assert "lancet_kernels.ddp" in text


def test_ddp_without_ranks():
    with pytest.raises(
        UserError, match="data parallelism: got no process group, expected one; call init_process_group"
    ):
        ddp(Step(Case(), Groups(), 1))


def bias_under_mixed_precision() -> tuple[torch.dtype, float, torch.dtype]:
    """-> dtype and first value of a correction bias after small updates; dtype of what the layer gives."""
    groups = Groups.around(dist.group.WORLD)
    layer = MoELayer(8, 8, 4, gate="sigmoid", top_k=2, capacity_factor=None, groups=groups)
    model = fsdp(nn.Sequential(nn.Linear(8, 8), layer), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    layer.correction_bias.fill_(-1.0)
    for _ in range(8):
        y = model(torch.randn(5, 8))
        y.float().sum().backward()
        layer.update_correction_bias(torch.tensor([0, 8, 0, 0]), rate=1e-4)
    return layer.correction_bias.dtype, float(layer.correction_bias[0]), y.dtype


def test_a_correction_bias_under_mixed_precision_keeps_small_updates(pool):
    for dtype, value, of_result in pool.run(bias_under_mixed_precision, ranks=2):
        assert (dtype, of_result) == (torch.float32, torch.bfloat16)
        assert value == pytest.approx(-1 + 8e-4, abs=1e-6)


def sharded_on_meta() -> tuple[str, list[str]]:
    """What is refused without a mesh; the devices of the meshes with one."""
    with torch.device("meta"):
        models = [nn.Sequential(nn.Linear(8, 8), MoELayer(8, 8, 4)) for _ in range(2)]
    told = refusal(lambda: fsdp(models[0]))
    fsdp(models[1], init_device_mesh("cpu", (dist.get_world_size(),)))
    return told, [parameter.device_mesh.device_type for parameter in models[1].parameters()]


def test_a_model_on_the_meta_device_is_sharded_over_a_mesh(pool):
    for told, kinds in pool.run(sharded_on_meta, ranks=2):
        assert told.startswith("sharding: got parameters on the meta device, and no mesh")
        assert {*kinds} == {"cpu"}


def sharded_over_other_ranks() -> list[str]:
    """What is refused on four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    layers = [MoELayer(8, 8, 4, groups=groups) for groups in (mesh, crossed)]
    return [refusal(lambda: fsdp(layers[0], mesh["replica"])), refusal(lambda: fsdp(layers[1]))]


def test_ranks_over_which_fsdp_cannot_shard(pool):
    for fewer, crossed in pool.run(sharded_over_other_ranks, ranks=4):
        assert fewer.startswith("mesh of fsdp: got ranks [")
        # A checkpoint would hold the halves of some experts in each other's place.
        assert crossed.startswith("expert groups of a sharded model: got [0, 3], [1, 2]")


def sharded_beside_another_model() -> bool:
    """Does the model of this rank and its neighbour give what it gave before it was sharded?"""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("model", "replica", "expert"))
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Sequential(nn.Linear(8, 8), MoELayer(8, 8, 4, groups=mesh["replica", "expert"]))
    x = torch.randn(4, 8)
    before = model(x)
    return torch.equal(fsdp(model)(x), before)


def test_models_of_different_ranks_are_sharded_apart(pool):
    assert pool.run(sharded_beside_another_model, ranks=4) == [True] * 4


def sharded_without_regard_for_experts() -> str:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), MoELayer(8, 8, 4, groups=dist.group.WORLD)))
    model(torch.randn(4, 8)).sum().backward()
    return refusal(torch.optim.SGD(model.parameters()).step)


def test_experts_that_fully_shard_took_for_the_same_are_not_trained(pool):
    for told in pool.run(sharded_without_regard_for_experts, ranks=2):
        assert told.startswith("experts to train: got fully_shard over ranks [0, 1], which hold different")
