"""Which tiles fit where, how launches are cut, which kernel takes them; the cache of tuned configurations."""

import json
import resource
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import config
from lancet_kernels.kernels.config import (
    Entry,
    GemmConfig,
    OverlapConfig,
    TunedCache,
    default_overlap_config,
    tuned,
)
from lancet_kernels.measure.fused_pass import Workload
from lancet_kernels.measure.tuner import Task
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
    ("runs", "change"),
    [
        (True, {}),
        (True, {"dtype": torch.float16}),
        (False, {"dtype": torch.float32}),
        (False, {"hidden": 96}),
        (False, {"far": True}),
        (False, {"arch": 100}),
        (False, {"arch": 80}),
    ],
    ids=str,
)
def test_the_hopper_kernel_is_the_default_where_it_can_run(runs, change):
    given = SIZES | {"arch": 90, "far": False} | change
    config = OverlapConfig.for_gpu(**{"programs": 132} | given)
    assert (config.bodies, config.programs) == ("gluon" if runs else "triton", 132)
    assert HOPPER.runs_on_hopper(**given) is runs


@pytest.mark.parametrize(
    "config", [replace(HOPPER, gemm=replace(HOPPER.gemm, block_n=128)), replace(HOPPER, tma=False)]
)
def test_the_hopper_kernel_has_its_own_tile_and_descriptors(config):
    assert not config.runs_on_hopper(**SIZES, arch=90, far=False)


def test_configuration_is_the_default_one():
    """What is proven here is what launches take on a CPU."""
    default = default_overlap_config(24, 20, "gelu", torch.float32, torch.device("cpu"))
    assert default == CONFIG


def test_launches_leave_multiprocessors_free(monkeypatch):
    h100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    monkeypatch.setattr(config, "tuned", lambda *_: None)
    given = 128, 192, "gelu", torch.bfloat16, torch.device("cuda", 0)
    assert default_overlap_config(*given).programs == 132
    monkeypatch.setenv("LANCET_FUSED_SMS", "100")
    assert default_overlap_config(*given).programs == 100
    measured = OverlapConfig.for_gpu(128, 192, torch.bfloat16, 90, 132)
    monkeypatch.setattr(config, "tuned", lambda *_: measured)
    assert default_overlap_config(*given) == replace(measured, programs=100)
    assert default_overlap_config(*given, far=True).bodies == "triton"
    for wrong in ("0", "133", "many"):
        monkeypatch.setenv("LANCET_FUSED_SMS", wrong)
        with pytest.raises(UserError, match=f"LANCET_FUSED_SMS: got {wrong}, expected 1 to 132"):
            default_overlap_config(*given)


# ---- the cache of tuned configurations

# What this machine has, as far as these tests know: nobody may touch it.
GPU = "NVIDIA H100 80GB HBM3"
TUNED = OverlapConfig(GemmConfig(64, 128, 64, 4, 4), programs=132, tma=True)
SHAPE, OTHER = (768, 3072, "gelu", 1), (768, 3072, "silu", 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TunedCache]:
    """The user's cache, empty."""
    monkeypatch.setenv(config.CACHE_VARIABLE, str(tmp_path / "user" / "tuned.json"))
    monkeypatch.setattr(config, "device_name", lambda device: (GPU, 90))
    config.user_cache.cache_clear()
    yield TunedCache(config.default_cache())
    config.user_cache.cache_clear()


def entry(tuned=TUNED, device=GPU, shape=SHAPE) -> Entry:
    return Entry(shape, "bfloat16", device, tuned, 1.0, 1.5, "3.6.0", "2026-11-21")


def look(shape=SHAPE, dtype=torch.bfloat16):
    return tuned(shape, dtype, torch.device("cuda", 0))


def test_only_what_was_tuned_is_found(cache) -> None:
    assert look() is None
    cache.put([entry()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert look() == TUNED
    assert look(OTHER) is None
    assert look(dtype=torch.float16) is None


def test_a_configuration_that_this_gpu_cannot_run_is_ignored_with_a_warning(cache) -> None:
    cache.put([entry(OverlapConfig(GemmConfig(256, 256, 128, 4, 5)))])
    with pytest.warns(UserWarning, match="cannot run on sm_90"):
        assert look() is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": "other", "version": 1, "entries": {}}', "\x00\x01", '{"version": 1}',
     '{"format": "lancet-tuned-configurations", "version": 99, "entries": {}}',
     '{"format": "lancet-tuned-configurations", "version": 1, "entries": 5}', "[" * 100000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_corrupt_file_is_ignored_with_one_warning_and_written_anew(cache, text) -> None:
    cache.path.parent.mkdir(parents=True)
    cache.path.write_text(text)
    with pytest.warns(UserWarning, match="not readable"):
        assert cache.entries() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.entries() == {}
    cache.put([entry()])
    assert look() == TUNED


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"put_rows": 64}},
        {"config": {**asdict(TUNED), "extra": 1}},
        {"config": {**asdict(TUNED), "put_rows": "64"}},
        {"config": {**asdict(TUNED), "gemm": {"block_m": 64}}},
        {"config": None},
        {"milliseconds": float("nan")},
        {"milliseconds": "1"},
        {"shape": [1, 2]},
        {"shape": [769, 3072, "gelu", 1]},
        {"unknown": 1},
    ],
)
def test_one_corrupt_entry_is_ignored_with_a_warning_and_the_others_stay(cache, change) -> None:
    good = entry(shape=OTHER)
    cache.put([good, entry()])
    data = json.loads(cache.path.read_text())
    data["entries"][entry().key] |= change
    cache.path.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="is ignored"):
        assert TunedCache(cache.path).entries() == {good.key: good}


def test_the_launcher_asks_for_the_shape_that_is_tuned(monkeypatch) -> None:
    """A task nobody looks up would be tuned for nothing."""
    asked = set()
    monkeypatch.setattr(config, "tuned", lambda shape, dtype, device: asked.add((shape, dtype)))
    task = Task(Workload("tiny", 12, 16, 32, 4, 2, "swiglu"), torch.float32)
    # It asks on a GPU only.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    with pytest.raises(AttributeError):
        config.default_overlap_config(16, 32, "swiglu", torch.float32, torch.device("cuda", 0))
    assert asked == {(task.shape, task.dtype)}


def test_a_cache_folder_that_cannot_be_written_is_said_once_and_replaced(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(config.CACHE_VARIABLE, raising=False)
    folder = config.cache_folder()
    assert folder == config.cache_folder() == config.default_cache().parent
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    (said,) = caplog.messages
    assert said.startswith(f"nothing is remembered: {tmp_path}/file/lancet_kernels cannot be written")
    TunedCache(config.default_cache()).put([entry()])


def test_a_cache_folder_on_a_full_disk_is_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # An empty file can still be made.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        folder = config.cache_folder()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tmp_path not in folder.parents
    assert "cannot be written to (File too large)" in caplog.text


def test_what_a_read_only_cache_folder_has_is_used(tmp_path, monkeypatch, caplog):
    TunedCache(tmp_path / "lancet_kernels" / "tuned.json").put([entry()])

    def refused(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(config.CACHE_VARIABLE, raising=False)
    assert list(TunedCache(config.default_cache()).entries().values()) == [entry()]
    assert "(Read-only file system)" in caplog.text


def test_a_named_cache_that_cannot_be_written_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "tuned.json"):
        with pytest.raises(UserError, match="expected a file that can be written; name another file"):
            TunedCache(path).check_writable()
