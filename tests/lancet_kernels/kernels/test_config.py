"""Which tiles fit where, how launches are cut, and which kernel takes them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import config as tuned
from lancet_kernels.kernels.config import GemmConfig, OverlapConfig, default_overlap_config
from lancet_kernels.kernels.overlap_data import check_gluon
from tests.lancet_kernels.kernels.overlap_ranks import CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"put_rows": 3}, "powers of 2"),
        ({"reduce_block": 0}, "powers of 2"),
        ({"programs": 0}, "programs: got 0, expected at least 1"),
        ({"bodies": "cutlass"}, "bodies: got 'cutlass', expected one of triton, gluon"),
    ],
)
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **changes)


def test_what_does_not_fit_is_invalid():
    assert GemmConfig(128, 256, 64, 8, 3).is_valid(torch.bfloat16, 90)
    assert not GemmConfig(128, 256, 64, 8, 5).is_valid(torch.bfloat16, 90)  # 240 KiB of operands
    assert not GemmConfig(128, 256, 64, 8, 4).is_valid(torch.bfloat16, 80)  # 192 KiB
    assert not GemmConfig(128, 256, 64, 4, 3).is_valid(torch.bfloat16, 90)  # 256 registers of accumulators
    assert not GemmConfig(128, 256, 64, 8, 3).is_valid(torch.bfloat16, 90, accumulators=2)
    assert not GemmConfig(96, 128, 64, 4, 3).is_valid(torch.bfloat16, 90)
    assert not GemmConfig(64, 16, 64, 4, 3).is_valid(torch.bfloat16, 90)


HOPPER, PORTABLE, AMPERE = (
    OverlapConfig.for_gpu(128, 192, torch.bfloat16, arch, 4, portable=portable)
    for arch, portable in ((90, False), (90, True), (80, False))
)


@pytest.mark.parametrize(
    ("config", "activation", "aligned", "backward", "tile", "columns_in", "tma", "gluon"),
    [
        (HOPPER, "gelu", True, False, "128x256x64 w8 s4", 256, True, True),
        (HOPPER, "swiglu", True, False, "128x256x64 w8 s4", 128, True, True),
        (HOPPER, "swiglu", True, True, "128x256x64 w8 s4", 256, True, True),
        (HOPPER, "gelu", False, True, "128x32x32 w8 s3", 32, False, False),
        (PORTABLE, "gelu", True, False, "128x128x64 w8 s4", 128, True, False),
        (PORTABLE, "gelu", True, True, "128x64x64 w8 s4", 64, True, False),
        (PORTABLE, "swiglu", False, False, "128x32x32 w8 s3", 32, False, False),
        (AMPERE, "swiglu", True, False, "64x64x32 w8 s4", 32, False, False),
    ],
)
def test_how_a_launch_is_cut(config, activation, aligned, backward, tile, columns_in, tma, gluon):
    cut = config.cut(torch.bfloat16, activation, aligned=aligned, backward=backward)
    assert (str(cut.gemm), *cut[1:]) == (tile, columns_in, tma, gluon)


SIZES = {"width": 128, "hidden": 192, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("", {}),
        ("", {"dtype": torch.float16}),
        ("type", {"dtype": torch.float32}),
        ("widths of model and experts", {"hidden": 96}),
        ("transport", {"far": True}),
        ("device", {"arch": 100}),
        ("device", {"arch": 80}),
    ],
    ids=str,
)
def test_the_hopper_kernel_is_the_default_where_it_can_run(what, change):
    given = SIZES | {"arch": 90} | change
    config = OverlapConfig.for_gpu(**{"programs": 132} | given)
    assert (config.bodies, config.programs) == ("triton" if what else "gluon", 132)
    refusals = HOPPER.refusals(**{"far": False} | given)
    assert [each[0] for each in refusals] == ([what] if what else [])


@pytest.mark.parametrize(
    ("what", "config"),
    [
        ("tile", replace(HOPPER, gemm=replace(HOPPER.gemm, block_n=128))),
        ("tma", replace(HOPPER, tma=False)),
        ("device", HOPPER),
    ],
)
def test_what_the_hopper_kernel_cannot_do_is_one_line(what, config):
    message = rf"{what} of a fused launch with bodies='gluon'.*use bodies='triton'"
    with pytest.raises(UserError, match=message):
        check_gluon(config, *SIZES.values(), torch.device("cpu"), nvshmem=False)


def test_configuration_is_the_default_one():
    """What is proven here is what launches take on a CPU."""
    default = default_overlap_config(24, 20, "gelu", torch.float32, torch.device("cpu"))
    assert default == CONFIG


def test_launches_leave_multiprocessors_free(monkeypatch):
    h100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    monkeypatch.setattr(tuned, "tuned", lambda *_: None)
    given = 128, 192, "gelu", torch.bfloat16, torch.device("cuda", 0)
    assert default_overlap_config(*given).programs == 132
    monkeypatch.setenv("LANCET_FUSED_SMS", "100")
    assert default_overlap_config(*given).programs == 100
    measured = OverlapConfig.for_gpu(128, 192, torch.bfloat16, 90, 132)
    monkeypatch.setattr(tuned, "tuned", lambda *_: measured)
    assert default_overlap_config(*given) == replace(measured, programs=100)
    assert default_overlap_config(*given, far=True).bodies == "triton"
    for wrong in ("0", "133", "many"):
        monkeypatch.setenv("LANCET_FUSED_SMS", wrong)
        with pytest.raises(UserError, match=f"LANCET_FUSED_SMS: got {wrong}, expected 1 to 132"):
            default_overlap_config(*given)
