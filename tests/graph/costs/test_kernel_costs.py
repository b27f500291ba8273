"""Kernels and dispatchers of a cluster file, by hand."""

from dataclasses import replace

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import cluster_names, load_cluster
from lancet_kernels.graph.costs.kernel_costs import KernelCosts
from lancet_kernels.graph.program.program import Instruction, TensorSpec

H100 = load_cluster("dgx-h100")
K = H100.kernels
WITH_KERNELS = [name for name in cluster_names() if load_cluster(name).kernels]


def gemm_ms(
    costs: KernelCosts, groups: int, m: int, n: int, k: int, op: str = "lancet.grouped_gemm"
) -> float:
    """The time of a product of x[groups * m, k] and w[groups, k, n]."""
    shapes = {"x": (groups * m, k), "counts": (1, groups), "w": (groups, k, n), "y": (groups * m, n)}
    tensors = {name: TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()}
    one = Instruction("gemm", op, ("x", "counts", "w"), ("y",), flops=2.0 * groups * m * n * k)
    return costs(one, tensors)


def test_a_gemm_that_fills_its_waves():
    costs = KernelCosts(H100, 8)
    # 128 x 256 tiles: 33 x 4 = 132, one on each multiprocessor.
    ms = gemm_ms(costs, 1, 33 * 128, 4 * 256, 4096, "aten.mm")
    efficiency = K.dense * 4096 / (4096 + K.k_overhead)
    assert ms == pytest.approx(2 * 33 * 128 * 1024 * 4096 / (989e9 * efficiency) + K.kernel_us * 1e-3)


def test_one_more_tile_takes_another_wave():
    costs = KernelCosts(replace(H100, kernels=replace(K, kernel_us=0.0)), 8)
    one, more = (gemm_ms(costs, 1, rows * 128, 1024, 4096, "aten.mm") for rows in (33, 34))
    assert more == pytest.approx(2 * one)


def test_few_rows_per_expert_are_slow():
    costs = KernelCosts(H100, 8)
    many, few = (gemm_ms(costs, g, 32768 // g, 2048, 2048) for g in (8, 256))
    assert few > 1.3 * many


def test_rows_and_tokens_on_the_wire():
    size = 4096 * 8 * 2048 * 2
    rows = KernelCosts(H100, 16, 16, "all-to-all", top_k=8).all_to_all_ms(size)
    # Half of the rows leave the node: 8 GPUs share 400 GB/s at 0.85.
    assert rows == pytest.approx(0.043 + 0.015 + 8 * size / 2 / 340e6)
    tokens = KernelCosts(H100, 16, 16, "hybridep", top_k=8).all_to_all_ms(size)
    assert tokens == pytest.approx(0.052 + 2 * (1 - 2**-8) * size / 8 / 53.9e6)


def test_groups_of_experts_limit_the_places_of_a_token():
    size = 4096 * 8 * 7168 * 2
    costs = KernelCosts(H100, 8, 8, "deepep", top_k=8, groups=8, top_groups=4)
    assert costs.all_to_all_ms(size) == pytest.approx(0.127 + 4 * size / 8 / 352e6)


def test_nothing_travels_on_one_rank():
    assert KernelCosts(H100, 8, 1).all_to_all_ms(1e9) == 0.0


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_efficiencies_are_fractions_and_bandwidths_stay_below_the_links(name):
    cluster = load_cluster(name)
    for key in ("dense", "grouped", "grouped_wgrad", "attention_forward", "attention_backward", "permute"):
        assert 0 < getattr(cluster.kernels, key) < 1
    for dispatcher in cluster.dispatchers.values():
        assert dispatcher.inside_gb_per_s <= cluster.intra_node_gb_per_s
        assert dispatcher.sends in ("rows", "tokens")
        assert len(dispatcher.ranks) == len(dispatcher.between_gb_per_s)


def test_a_cluster_without_kernels():
    with pytest.raises(UserError, match=r"no table \[kernels\]"):
        KernelCosts(load_cluster("p4de"), 8)


def test_attention_by_width_and_window():
    kernel = load_cluster("gb200-nvl72").attention["cudnn"]
    assert kernel.efficiency(128, 4096, 0, is_backward=False) == 0.563
    assert kernel.efficiency(192, 4096, 0, is_backward=True) == 0.423
    # The benchmark's 0.210 and 0.465 ms: two sequences of 4,096 tokens, 128 heads of 64, a window of 128.
    useful = 2 * 128 * (4096 * 128 - 128**2 / 2) * 4 * 64
    forward = useful / (2500e9 * kernel.efficiency(64, 4096, 128, is_backward=False))
    backward = 2.5 * useful / (2500e9 * kernel.efficiency(64, 4096, 128, is_backward=True))
    assert forward == pytest.approx(0.210, rel=0.02)
    assert backward == pytest.approx(0.465, rel=0.02)
    # A window that is hardly shorter than the sequence takes as long as none.
    assert kernel.efficiency(64, 4096, 4000, is_backward=False) == 0.283


def test_attention_without_a_kernel_is_as_the_file_says():
    query = TensorSpec("q", (1, 32, 4096, 64), "bfloat16")
    one = Instruction(
        "a", "lancet_prediction.attention", ("q", "k", "v"), ("o",), flops=1e12, attributes={"window": 0}
    )
    tensors = {name: replace(query, name=name) for name in "qkvo"}
    plain, flex = (KernelCosts(H100, 8, attention=name)(one, tensors) for name in ("", "flex"))
    assert plain == pytest.approx(1e12 / (989e9 * K.attention_forward) + K.kernel_us * 1e-3)
    assert flex == pytest.approx(1e12 / (989e9 * 0.258) + K.kernel_us * 1e-3)
    with pytest.raises(UserError, match="attention: got 'eager'"):
        KernelCosts(H100, 8, attention="eager")
