"""Two transformer layers on 4 ranks under the partition that is found, or Megatron's: the mathematics of one
device, parameters held in slices under their own names."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from lancet_kernels import UserError, save_safetensors
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.rules.slices import Partition, Primitive, home_square, replicate, split
from lancet_kernels.parallelization.parallel_linears import ATTENTION, MLP, OPERATORS, parallelize_linears
from lancet_kernels.parallelization.square_layer import PartitionedLinear, whole_state_dict
from tests.grids import few_of
from tests.lancet_kernels.parallelization.test_parallelize import distance
from tests.lancet_kernels.parallelization.test_square_layer import trained_side_by_side
from tests.ranks import RankPool
from tests.setups import refused

WIDTH, HEADS, BATCH, SEQUENCE = 32, 8, 4, 4
FAMILIES = dict(zip(("gpt2", "opt", "llama", "bloom"), zip(ATTENTION, MLP, strict=True), strict=True))


class Conv1D(nn.Module):
    """GPT-2's, recognized by its name."""

    def __init__(self, n: int, k: int, bias: bool) -> None:
        super().__init__()
        linear = nn.Linear(n, k)
        self.weight, self.bias = nn.Parameter(linear.weight.detach().T.contiguous()), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """By the names of a family; the code between its linear layers is alike."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = HEADS, WIDTH // HEADS, WIDTH
        names, bias, self.is_by_head = FAMILIES[family][0], family != "llama", family == "bloom"
        self.first, self.last = names.inner, names.outer
        key_value = WIDTH // 2 if family == "llama" else WIDTH
        widths = (3 * WIDTH,) if len(self.first) == 1 else (WIDTH, key_value, key_value)
        linear = Conv1D if family == "gpt2" else nn.Linear
        for name, features in zip(self.first, widths, strict=True):
            self.add_module(name, linear(WIDTH, features, bias))
        self.add_module(self.last, linear(WIDTH, WIDTH, bias))

    def forward(self, x: Tensor) -> Tensor:
        each = [getattr(self, name)(x) for name in self.first]
        if self.is_by_head:
            fused = each[0].unflatten(-1, (self.num_heads, 3, self.head_dim))
            q, k, v = (fused[..., n, :].transpose(1, 2) for n in range(3))
        else:
            each = each if len(each) > 1 else each[0].split(self.split_size, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in each)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return getattr(self, self.last)(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        names = FAMILIES[family][1]
        self.first, self.last = names.inner, names.outer
        for name in self.first:
            self.add_module(name, nn.Linear(WIDTH, 2 * WIDTH, family != "llama"))
        self.add_module(self.last, nn.Linear(2 * WIDTH, WIDTH, family != "llama"))

    def forward(self, x: Tensor) -> Tensor:
        hidden = [getattr(self, name)(x) for name in self.first]
        y = silu(hidden[0]) * hidden[1] if len(hidden) > 1 else gelu(hidden[0]) + 0.5
        return getattr(self, self.last)(y)


class Layer(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(family), Mlp(family)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(family), Layer(family)).double()


def slow_cluster() -> Cluster:
    """As if tiles were large: latency counts for little, and GEMMs hide what travels beside them."""
    cluster = load_cluster("p3dn")
    slow = {dtype: 1e-4 * share for dtype, share in cluster.compute_efficiency.items()}
    return replace(cluster, intra_node_latency_us=0.0, launch_us=0.0, compute_efficiency=slow)


def train_on_rank(family: str, strategy: str, partitions: dict | None) -> dict:
    """Two steps whole and in parts, side by side. The second MLP's parameters are not trained."""
    whole, parted = make_model(family), make_model(family)
    for model in (whole, parted):
        model[1].mlp.requires_grad_(False)
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64)
    parallelize_linears(parted, (x,), None, strategy, cluster=slow_cluster(), partitions=partitions)
    models = whole, parted
    errors, _ = trained_side_by_side(models, models, (x.shape, x.shape), steps=2)
    reference, own = whole.state_dict(), whole_state_dict(parted)
    errors["parameter"] = max(distance(reference[name], own[name]) for name in reference)
    layers = [m for m in parted.modules() if isinstance(m, PartitionedLinear)]
    return {
        "errors": errors,
        "names": list(parted.state_dict()) == list(reference) == list(own),
        "held": [(layer.weight.nbytes, 0 if layer.bias is None else layer.bias.nbytes) for layer in layers],
        "sizes": [(layer.in_features, layer.out_features, layer.bias is not None) for layer in layers],
        "partitions": [layer.partition for layer in layers],
    }


def check(results: list[dict]) -> list[Partition]:
    """-> the partitions of the linear layers, in their order."""
    for result in results:
        assert max(result["errors"].values()) < 1e-9, result["errors"]
        assert result["names"]
        expected = [
            (8 * n * k // (p.slices("n") * p.slices("k")), has_bias * 8 * k // p.slices("k"))
            for (n, k, has_bias), p in zip(result["sizes"], result["partitions"], strict=True)
        ]
        assert result["held"] == expected
    return results[0]["partitions"]


@pytest.mark.parametrize(
    ("family", "strategy"),
    # The other strategy of each: test_transformers_models.
    few_of([("opt", "primepar"), ("gpt2", "megatron"), ("llama", "megatron"), ("bloom", "primepar")]),
)
def test_two_layers_equal_those_of_one_device(pool: RankPool, family: str, strategy: str) -> None:
    partitions = check(pool.run(train_on_rank, family, strategy, None, ranks=4))
    assert any(p.steps > 1 for p in partitions) == (strategy == "primepar")


def saved(folder: str, family: str) -> None:
    """A checkpoint behind a step, from all ranks; the parameters, and those behind another step."""
    model = make_model(family)
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parallelize_linears(model, (x,), cluster=slow_cluster())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3)
    after = []
    for step in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append(copy.deepcopy(whole_state_dict(model)))
        if step == 0:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            checkpoint.save(state, checkpoint_id=f"{folder}/checkpoint")
    if dist.get_rank() == 0:
        torch.save(after, f"{folder}/expected")


def loaded(folder: str, family: str, strategy: str) -> tuple[float, float, float]:
    """Errors of the parameters, of those behind another step, and of those of whole tensors loaded."""
    model, (now, then) = make_model(family), torch.load(f"{folder}/expected")
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        parameter.data.zero_()
    model = copy.deepcopy(parallelize_linears(model, (x,), None, strategy, cluster=slow_cluster()))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=f"{folder}/checkpoint")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    errors = [max(distance(now[name], t) for name, t in whole_state_dict(model).items())]
    model(x).square().sum().backward()
    optimizer.step()
    errors += [max(distance(then[name], t) for name, t in whole_state_dict(model).items())]
    model.load_state_dict(now)
    return *errors, max(distance(now[name], t) for name, t in whole_state_dict(model).items())


@pytest.mark.parametrize(
    ("family", "ranks", "strategy"),
    few_of([("gpt2", 4, "megatron"), ("gpt2", 1, "primepar"), ("llama", 1, "primepar")], 0, 1),
)
def test_a_checkpoint_loads_under_other_partitions(
    pool: RankPool, tmp_path: Path, family: str, ranks: int, strategy: str
) -> None:
    pool.run(saved, str(tmp_path), family, ranks=4)
    for same, step, whole in pool.run(loaded, str(tmp_path), family, strategy, ranks=ranks):
        assert same == whole == 0.0
        assert step < 1e-9


M, N, K, H, ONE, P2 = split("m"), split("n"), split("k"), split("h"), replicate(), home_square(1, "n")


@pytest.mark.parametrize(
    "primitives",
    few_of(
        [
            pytest.param(([P2], [H, ONE], [P2], [P2], [M, K], [P2])),
            pytest.param(([M, N], [H, H], [N, M], [K, M], [K, ONE], [K, K])),
            pytest.param(([N, N], [ONE, ONE], [M, M], [N, K], [ONE, M], [M, N])),
        ],
        1,
    ),
)
def test_any_partition_of_the_space(pool: RankPool, primitives: tuple[list[Primitive], ...]) -> None:
    """Sums in each phase, replicas, rows that are cut differently on both sides."""
    partitions = {name: Partition(tuple(of)) for name, of in zip(OPERATORS, primitives, strict=True)}
    check(pool.run(train_on_rank, "gpt2", "primepar", partitions, ranks=4))


def odd_heads_on_rank() -> tuple[float, float]:
    """Errors of the output and of the weight of 5 heads of 8 features, whose queries, keys and values are cut
    in a square."""
    torch.manual_seed(0)
    whole = nn.Sequential(Layer("gpt2"))
    attention = whole[0].attention
    attention.num_heads, attention.head_dim, attention.split_size = 5, 8, 40
    attention.c_attn, attention.c_proj = Conv1D(WIDTH, 120, True), Conv1D(40, WIDTH, True)
    parted, x = copy.deepcopy(whole), torch.randn(BATCH, SEQUENCE, WIDTH)
    parallelize_linears(parted, (x,), partitions={"qkv": Partition((P2,))}, cluster=slow_cluster())
    weights = (whole_state_dict(model)["0.attention.c_attn.weight"] for model in (parted, whole))
    return distance(parted(x), whole(x)), distance(*weights)


def test_heads_need_not_be_divided_by_slices(pool: RankPool) -> None:
    for output, weight in pool.run(odd_heads_on_rank, ranks=4):
        assert output < 1e-5
        assert weight == 0.0


@pytest.mark.long
def test_two_layers_on_sixteen_ranks(pool_of_16: RankPool) -> None:
    check(pool_of_16.run(train_on_rank, "opt", "primepar", None, ranks=16, timeout_s=300))


@pytest.mark.long
def test_squares_and_splits_on_sixteen_ranks(pool_of_16: RankPool) -> None:
    every = {
        "qkv": (P2, P2), "attention": (H, H, H, ONE), "projection": (home_square(2, "k"),),
        "fc1": (M, P2, K), "activation": (M, M, K, K), "fc2": (N, P2, M),
    }  # fmt: skip
    partitions = {name: Partition(of) for name, of in every.items()}
    check(pool_of_16.run(train_on_rank, "opt", "primepar", partitions, ranks=16, timeout_s=300))


def limited_on_rank(memory_gb: float | None) -> tuple[str, list[int], float]:
    """A large batch, for which rows are cut and weights replicated where memory allows it. -> message, into
    how many tiles weights are cut, error of the output."""
    whole = make_model("opt")
    x = torch.randn(256, SEQUENCE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        parted = parallelize_linears(copy.deepcopy(whole), (x,), cluster=slow_cluster(), memory_gb=memory_gb)
    except UserError as error:
        return str(error), [], 0.0
    layers = [m.partition for m in parted.modules() if isinstance(m, PartitionedLinear)]
    tiles = [p.slices("n") * p.slices("k") for p in layers]
    return "", tiles, distance(whole(x), parted(x))


def test_a_memory_limit_keeps_weights_from_being_replicated(pool: RankPool) -> None:
    free, limited, impossible = (
        pool.run(limited_on_rank, memory_gb, ranks=4)[0] for memory_gb in (None, 4e-4, 1e-5)
    )
    assert min(free[1]) == 1
    assert set(limited[1]) == {4}
    assert max(free[2], limited[2]) < 1e-9
    assert re.match(r"memory limit: got 1e-05 GB, expected at least 0.000\d+ GB", impossible[0]), impossible
    assert impossible[0].endswith("use more devices, or a smaller batch")


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


def shared_on_rank() -> dict[str, float]:
    """A block that stands twice in the model, and two whose layers do more than a linear one."""
    layer = make_model("opt")[0]
    whole = nn.Sequential(layer, layer, *make_model("llama")).double()
    whole[2].mlp.down_proj = Scaled(2 * WIDTH, WIDTH).double()
    nn.utils.parametrizations.weight_norm(whole[3].mlp.down_proj)
    parted = copy.deepcopy(whole)
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64)
    parallelize_linears(parted, (x,), cluster=slow_cluster())
    models = whole, parted
    errors, _ = trained_side_by_side(models, models, (x.shape, x.shape), steps=2)
    reference, own = whole.state_dict(), whole_state_dict(parted)
    return errors | {name: distance(reference[name], own[name]) for name in reference}


def test_shared_blocks_and_layers_that_do_more(pool: RankPool) -> None:
    for errors in pool.run(shared_on_rank, ranks=2):
        assert max(errors.values()) < 1e-9, errors


def refused_on_rank() -> None:
    tied = make_model("opt")
    tied[1].mlp.fc1.weight = tied[0].mlp.fc1.weight
    x = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64)
    rows_in_halves = dict.fromkeys(("fc1", "activation", "fc2"), Partition((M,)))
    of_qkv = "partition of qkv of 0.attention: got {H}, expected one over 2 ranks whose slices divide m = 16"
    of_rows = "rows and features of an activation: got a tile of (3, 32) on rank"
    for said, model, strategy, partitions in (
        ("linear layers of Linear: got no module with", nn.Linear(4, 4), "primepar", {}),
        ("linear layers of Sequential: got 2 parameters that other modules have, too", tied, "primepar", {}),
        ("strategy: got 'alpa', expected one of primepar, megatron", make_model("opt"), "alpa", {}),
        ("partitions: got mlp, expected qkv", make_model("opt"), "primepar", {"mlp": Partition((M,))}),
        (of_qkv, make_model("opt"), "megatron", {"qkv": Partition((H,))}),
        (of_rows, make_model("opt"), "megatron", rows_in_halves),
    ):
        with refused(said):
            parallelize_linears(model, (x,), None, strategy, partitions=partitions)(x[:1, :3])


def test_bad_input_gets_one_line(pool: RankPool) -> None:
    pool.run(refused_on_rank, ranks=2)


SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 16, "resid_pdrop": 0, "embd_pdrop": 0,
             "attn_pdrop": 0},
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "ffn_dim": 64,
            "word_embed_proj_dim": 32, "max_position_embeddings": 16, "dropout": 0},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
              "num_key_value_heads": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 8, "hidden_dropout": 0, "attention_dropout": 0},
}  # fmt: skip


def transformers_model(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=64, attn_implementation="eager", **SIZES[family])
    return AutoModelForCausalLM.from_config(config).double()


def train_transformers_on_rank(family: str, strategy: str, folder: str) -> dict[str, float]:
    whole, parted = transformers_model(family), transformers_model(family)
    tokens = torch.randint(2, 64, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    parallelize_linears(parted, inputs, None, strategy, cluster=slow_cluster())
    losses = [model(**inputs).loss for model in (whole, parted)]
    for model, loss in zip((whole, parted), losses, strict=True):
        loss.backward()
        torch.optim.SGD(model.parameters(), 1.0).step()
    reference, own = whole.state_dict(), whole_state_dict(parted)
    assert list(parted.state_dict()) == list(reference)
    count = sum(isinstance(m, PartitionedLinear) for m in parted.modules())
    save_safetensors(parted, folder)
    loaded = type(whole).from_pretrained(folder).state_dict()
    return {
        "loss": distance(*losses),
        "parameter": max(distance(reference[name], own[name]) for name in reference),
        "saved": max(distance(loaded[name], own[name]) for name in reference),
        "layers": count,
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "layers", "strategy"),
    [("gpt2", 8, "primepar"), ("opt", 12, "megatron"), ("llama", 14, "primepar"), ("bloom", 8, "megatron")],
)
def test_transformers_models(pool: RankPool, tmp_path: Path, family: str, layers: int, strategy: str) -> None:
    """Attention in transformers takes the softmax, and Bloom's all scores, in float32."""
    pytest.importorskip("transformers")
    for result in pool.run(train_transformers_on_rank, family, strategy, str(tmp_path), ranks=4):
        assert result["layers"] == layers
        assert result["loss"] < 1e-7
        assert result["saved"] == 0.0
        assert result["parameter"] < 1e-6
