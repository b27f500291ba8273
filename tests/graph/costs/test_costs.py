"""Clusters, the communication model, the roofline, measured times on disk, and parts of instructions.

Kernels and dispatchers of a cluster file, by hand.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from importlib import resources

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import CommunicationModel, cluster_names, load_cluster
from lancet_kernels.graph.costs.costs import CostModel, KernelCosts, roofline_ms
from lancet_kernels.graph.costs.part_instruction import can_be_cut, part_instruction, part_tensor, reassembly
from lancet_kernels.graph.costs.profiler import Profiler
from lancet_kernels.graph.program import Instruction, Kind, TensorSpec
from lancet_kernels.graph.rules.rules import CARRIED, IRREGULAR, PARTIAL, cut_along
from lancet_kernels.ops.comm.groups import Groups
from tests.schedules.small_programs import GivenCosts

T, D, F = 64, 32, 128


def mm():
    specs = {
        "x": TensorSpec("x", (T, D), "float16"),
        "w": TensorSpec("w", (D, F), "float16"),
        "y": TensorSpec("y", (T, F), "float16"),
    }
    traffic = sum(s.content_bytes for s in specs.values())
    return Instruction("mm", "aten.mm", ("x", "w"), ("y",), flops=2.0 * T * D * F, bytes=traffic), specs


def test_every_cluster_loads():
    assert {"dgx-h100", "local", "p3dn"} < {*cluster_names()}
    assert [load_cluster(name).name for name in cluster_names()] == cluster_names()


def test_a_cluster_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="cluster: got 'p9'"):
        load_cluster("p9")
    with pytest.raises(UserError, match="readable TOML"):
        load_cluster(tmp_path / "missing.toml")


MINE = 'name = "mine"\n'
P3DN, H100 = (
    (resources.files("lancet_kernels.graph.costs") / "clusters" / f"{name}.toml").read_text()
    for name in ("p3dn", "dgx-h100")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINE, r"mine\.toml: got missing key compute_efficiency, description"),
        (MINE + "speed = 1", r"mine\.toml: got unknown key speed, expected keys among"),
        (
            MINE + "[peak_tflops]\nfloat32 = 1\nlaunch_us = 9",
            r"key launch_us inside \[peak_tflops\], expected it above the first",
        ),
        (MINE + "[kernels]\nmemory_gb = 9", r"key memory_gb inside \[kernels\], expected it above"),
        (
            MINE + "[dispatchers.mine]\nmemory_gb = 9",
            r"key memory_gb inside \[dispatchers.mine\], expected it above",
        ),
        (P3DN.replace("memory_gb = 32.0", "memory_gb = -1"), "memory_gb in"),
        (
            P3DN + "\n[kernels]\nspeed = 1",
            r"\[kernels\] in cluster file .*: got unknown key speed, expected keys among",
        ),
        (
            P3DN + '\n[dispatchers.mine]\nsends = "rows"',
            r"\[dispatchers.mine\] in .*: got missing key inside_gb_per_s, ",
        ),
        (P3DN + "\n[dispatchers]\nmine = 1", r"\[dispatchers.mine\] in .*: got 1, expected a table"),
        (
            H100.replace("multiprocessors = 132", "multiprocessors = 0"),
            r"multiprocessors in \[kernels\] in .*",
        ),
        (re.sub(r"dense = .*", 'dense = "x"', H100), r"dense in \[kernels\] .*: got x, expected a positive"),
        (re.sub(r"widths = .*", "widths = [64, -1]", H100), r"widths in \[attention\..*: got -1"),
        (re.sub(r"widths = .*", "widths = 64", H100), r"widths in .*: got 64, expected a list of numbers"),
        (
            re.sub(r"(?m)^forward = .*", "forward = [0.5]", H100),
            r"got \d widths, 1 forward, \d backward, expected",
        ),
        (re.sub(r"window_keys = .*", "window_keys = [1]", H100), r"got \[1\], expected a list of two"),
        (
            re.sub(r"ranks = .*", "ranks = []", H100),
            r"deepep\] .*: got 0 ranks, 3 between_gb_per_s, expected",
        ),
        (H100.replace('"tokens"', '"token"'), r"sends in .*: got 'token', expected one of rows, tokens"),
        (P3DN.replace("memory_gb = 32.0", "memory_gb = [32]"), r"memory_gb in .*: got \[32\]"),
        (P3DN.replace("memory_gb = 32.0", "memory_gb = nan"), r"memory_gb in .*: got nan"),
        (P3DN.replace("gpus_per_node = 8", "gpus_per_node = 2.5"), "got 2.5, expected a positive whole"),
        (P3DN.replace('name = "p3dn"', "name = 3"), "name in .*: got 3, expected text"),
    ],
)
def test_cluster_files_are_checked(tmp_path, text, message):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_cluster(file)


def test_a_cluster_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(P3DN.replace("launch_us = 9.0", "launch_us = 0.0"))
    assert load_cluster(file).launch_us == 0


def test_groups_that_do_not_fill_nodes_are_on_several():
    """24 ranks on nodes of 8: groups of 12 and of 6 cross nodes, groups of 8 do not."""
    cluster = load_cluster("p3dn")
    ms = {
        ranks: CommunicationModel.from_cluster(cluster, 24, ranks).milliseconds("all_to_all", 16e6)
        for ranks in (6, 8, 12, 24)
    }
    assert 10 * ms[8] < ms[6] < ms[12] < ms[24]


def test_interpolation_by_hand():
    model = CommunicationModel.measured({("all_to_all", "world"): [(1024, 1.0), (2048, 2.0), (4096, 3.0)]})

    def ask(size):
        return model.milliseconds("all_to_all", size)

    assert [ask(s) for s in (0, 512, 1024, 1536, 2048, 3072, 4096)] == [1, 1, 1, 1.5, 2, 2.5, 3]
    assert ask(8192) == 5  # the last slope goes on: 1 ms per 2048 bytes
    with pytest.raises(UserError, match="all_reduce in world"):
        model.milliseconds("all_reduce", 1)
    # Samples of one size count as their median, and noise cannot make time negative.
    samples = [(1024, 2.0), (1024, 9.0), (1024, 1.0), (2048, 1.0)]
    model = CommunicationModel.measured({("all_to_all", "world"): samples})
    assert (ask(1024), ask(1 << 30)) == (2, 1)


def test_calculated_all_to_all_by_hand():
    p3dn = load_cluster("p3dn")
    model = CommunicationModel.from_cluster(p3dn, 16)
    # 8 ranks x 16 MiB x 8/16 leave a node at 12.5 x 0.8 GB/s; 45 us latency and 15 peers of 2 us.
    expected = 8 * (1 << 24) * 8 / 16 / 10e9 * 1e3 + 0.045 + 0.030
    assert model.milliseconds("all_to_all", 1 << 24) == pytest.approx(expected)
    assert CommunicationModel.from_cluster(p3dn, 1).milliseconds("all_reduce", 1 << 20) == pytest.approx(0.04)
    with pytest.raises(UserError, match="number of GPUs"):
        CommunicationModel.from_cluster(p3dn, 12)


def test_roofline_by_hand():
    p4de = load_cluster("p4de")
    assert roofline_ms(p4de, "float16", 1e12, 0) == pytest.approx(1 / 156 * 1e3 + 0.008)
    assert roofline_ms(p4de, "float16", 0, 2.039e9 * 0.8) == pytest.approx(1.008)
    assert roofline_ms(p4de, "float16", 0, 0) == 0


def test_costs_prefer_what_was_measured():
    instruction, specs = mm()
    cost = CostModel.for_cluster(load_cluster("p4de"), 8)
    assert cost(instruction, specs) < 1
    carries = replace(instruction, milliseconds=5.0)
    assert cost(carries, specs) == 5.0
    # A part of a measured whole pays the launch (8 us) again.
    part, part_specs = part_instruction(carries, specs, {"x": cut_along(0), "y": cut_along(0)}, 0, 2)
    assert cost(part, part_specs) == pytest.approx(0.008 + (5 - 0.008) / 2)
    assert GivenCosts(0.5)(part, part_specs) == 3.0


def test_parts_read_whole_weights_again():
    instruction, specs = mm()
    part, part_specs = part_instruction(instruction, specs, {"x": cut_along(0), "y": cut_along(0)}, 1, 4)
    assert (part.name, part.inputs, part.outputs) == ("mm_part1", ("x_part1", "w"), ("y_part1",))
    assert part.flops == instruction.flops / 4
    assert part.bytes == 2 * (T * D / 4 + D * F + T * F / 4)
    assert part_specs["x_part1"].shape == (T // 4, D)
    cost = CostModel.for_cluster(load_cluster("p4de"), 8)
    assert 4 * cost(part, part_specs) > cost(instruction, specs)


def test_irregular_parts_have_one_kth_of_the_rows():
    spec = TensorSpec("b", (40, 4), "float32")
    part = part_tensor(spec, IRREGULAR, 0, 4, row_dimension=0)
    assert (part.shape, part.bytes) == ((10, 4), spec.bytes // 4)
    counts = part_tensor(TensorSpec("n", (2, 2), "int64"), IRREGULAR, 0, 4)
    assert (counts.shape, counts.bytes) == ((2, 2), 32)
    exchange = Instruction("x", "lancet.all_to_all", ("b", "n", "m"), ("c",), Kind.ALL_TO_ALL, bytes=640)
    specs = {"b": spec, "c": TensorSpec("c", spec.shape), "n": TensorSpec("n", (2, 2), "int32")}
    specs["m"] = TensorSpec("m", (2, 2), "int32")
    forms = dict.fromkeys(("b", "n", "m", "c"), IRREGULAR)
    made, _ = part_instruction(exchange, specs, forms, 0, 4)
    assert made.bytes == 160


def test_which_cuts_line_up():
    specs = {"x": TensorSpec("x", (6, 2)), "y": TensorSpec("y", (12,)), "c": TensorSpec("c", (2, 7))}
    assert can_be_cut(specs, {"x": cut_along(0), "y": cut_along(0)}, 3)
    assert not can_be_cut(specs, {"x": cut_along(0), "y": cut_along(0)}, 4)
    assert can_be_cut(specs, {"c": cut_along(1)}, 4)
    specs["z"] = TensorSpec("z", (9,))
    assert not can_be_cut(specs, {"x": cut_along(0), "z": cut_along(0)}, 2)
    assert not can_be_cut(specs, {"c": cut_along(1)}, 8)


def test_reassembly_is_not_free():
    spec = TensorSpec("x", (10,), "float32")
    assert reassembly(spec, cut_along(0), 4) == (0, 80)
    assert reassembly(spec, PARTIAL, 4) == (160, 200)
    assert reassembly(spec, CARRIED, 4) == (0, 0)


def measured_times(path) -> Profiler:
    return Profiler(Groups(), torch.device("cpu"), path)


def test_measured_times_survive_and_merge(tmp_path):
    path = tmp_path / "deep" / "times.json"
    one, two = measured_times(path), measured_times(path)
    one._store({"a": 1.0})
    two._store({"b": 2.0})
    assert measured_times(path).times == {"a": 1.0, "b": 2.0}
    assert [f.name for f in path.parent.iterdir() if not f.name.endswith(".lock")] == ["times.json"]
    with pytest.raises(AssertionError, match="nan"):
        one._store({"a": float("nan")})


@pytest.mark.parametrize("times", ['{"a": "fast"}', "[1]"])
def test_a_corrupt_file_is_ignored_with_one_warning(tmp_path, times):
    """Other content than times; what else may be wrong with such a file: test_config.py of the kernels."""
    path = tmp_path / "times.json"
    path.write_text(f'{{"format": "lancet-measured-times", "version": 1, "milliseconds": {times}}}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured_times(path)._store({"a": 1.0})
    assert len(caught) == 1
    assert "not readable" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured_times(path).times == {"a": 1.0}


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


def test_gemms_in_waves_of_tiles():
    costs = KernelCosts(replace(H100, kernels=replace(K, kernel_us=0.0)), 8)
    # 128 x 256 tiles: 33 x 4 = 132, one on each multiprocessor; one more row of them takes another wave.
    one, more = (gemm_ms(costs, 1, rows * 128, 1024, 4096, "aten.mm") for rows in (33, 34))
    efficiency = K.dense * 4096 / (4096 + K.k_overhead)
    assert one == pytest.approx(2 * 33 * 128 * 1024 * 4096 / (989e9 * efficiency))
    assert more == pytest.approx(2 * one)
    # Few rows per expert are slow.
    many, few = (gemm_ms(costs, g, 32768 // g, 2048, 2048) for g in (8, 256))
    assert few > 1.3 * many


def test_rows_and_tokens_on_the_wire():
    size = 4096 * 8 * 2048 * 2
    rows = KernelCosts(H100, 16, 16, "all-to-all", top_k=8).all_to_all_ms(size)
    # Half of the rows leave the node: 8 GPUs share 400 GB/s at 0.85.
    assert rows == pytest.approx(0.043 + 0.015 + 8 * size / 2 / 340e6)
    tokens = KernelCosts(H100, 16, 16, "hybridep", top_k=8).all_to_all_ms(size)
    assert tokens == pytest.approx(0.052 + 2 * (1 - 2**-8) * size / 8 / 53.9e6)
    # Experts of four of eight groups are on four ranks.
    grouped = KernelCosts(H100, 8, 8, "deepep", top_k=8, groups=8, top_groups=4).all_to_all_ms(size)
    assert grouped == pytest.approx(0.127 + 4 * size / 8 / 352e6)
    assert KernelCosts(H100, 8, 1).all_to_all_ms(size) == 0, "one rank"


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_efficiencies_are_fractions_and_bandwidths_stay_below_the_links(name):
    cluster = load_cluster(name)
    for key in ("dense", "grouped", "grouped_wgrad", "attention_forward", "attention_backward", "permute"):
        assert 0 < getattr(cluster.kernels, key) < 1
    for dispatcher in cluster.dispatchers.values():
        assert dispatcher.inside_gb_per_s <= cluster.intra_node_gb_per_s
        assert dispatcher.sends in ("rows", "tokens")
        assert len(dispatcher.ranks) == len(dispatcher.between_gb_per_s)


@pytest.mark.parametrize("rows", [(1, 16, 64, 128), (129, 200, 256)])
def test_fewer_rows_than_tiles_have_take_as_long(rows):
    times = [gemm_ms(KernelCosts(H100, 8), 16, m, 768, 2048) for m in rows]
    assert times == pytest.approx([times[-1]] * len(rows))


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
    # A window is one of all keys, of which context parallelism leaves a rank some queries.
    tensors["q"] = replace(query, shape=(1, 32, 512, 64))
    window = replace(one, attributes={"window": 1024})
    of_all = H100.attention["flex"].efficiency(64, 4096, 1024, is_backward=False)
    expected = 1e12 / (989e9 * of_all) + K.kernel_us * 1e-3
    assert KernelCosts(H100, 8, attention="flex")(window, tensors) == pytest.approx(expected)
    with pytest.raises(UserError, match="attention: got 'eager'"):
        KernelCosts(H100, 8, attention="eager")
    with pytest.raises(UserError, match=r"no table \[kernels\]"):
        KernelCosts(load_cluster("p4de"), 8)
