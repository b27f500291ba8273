"""The cache of tuned configurations, and who looks where in which order."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import config as tuning
from lancet_kernels.kernels.config import Entry, GemmConfig, OverlapConfig, TunedCache, tuned
from lancet_kernels.measure.tuner import Task
from lancet_kernels.measure.workloads import Workload

# What this machine has, as far as these tests know: nobody may touch it.
GPU = "NVIDIA H100 80GB HBM3"
CONFIG = OverlapConfig(GemmConfig(64, 128, 64, 4, 4), programs=132, tma=True)
SHAPE, OTHER = (768, 3072, "gelu", 1), (768, 3072, "silu", 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TunedCache]:
    """The user's cache, empty."""
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "user" / "tuned.json"))
    monkeypatch.setattr(tuning, "device_name", lambda device: (GPU, 90))
    tuning.user_cache.cache_clear()
    yield TunedCache(tuning.default_cache())
    tuning.user_cache.cache_clear()


def entry(config=CONFIG, device=GPU, shape=SHAPE) -> Entry:
    return Entry(shape, "bfloat16", device, config, 1.0, 1.5, "3.6.0", "2026-11-21")


def look(shape=SHAPE, dtype=torch.bfloat16):
    return tuned(shape, dtype, torch.device("cuda", 0))


def test_only_what_was_tuned_is_found(cache) -> None:
    assert look() is None
    cache.put([entry()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert look() == CONFIG
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
    assert look() == CONFIG


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"put_rows": 64}},
        {"config": {**asdict(CONFIG), "extra": 1}},
        {"config": {**asdict(CONFIG), "put_rows": "64"}},
        {"config": {**asdict(CONFIG), "gemm": {"block_m": 64}}},
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
    monkeypatch.setattr(tuning, "tuned", lambda shape, dtype, device: asked.add((shape, dtype)))
    task = Task(Workload("tiny", 12, 16, 32, 4, 2, "swiglu"), torch.float32)
    # It asks on a GPU only.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    with pytest.raises(AttributeError):
        tuning.default_overlap_config(16, 32, "swiglu", torch.float32, torch.device("cuda", 0))
    assert asked == {(task.shape, task.dtype)}


def test_a_cache_folder_that_cannot_be_written_is_said_once_and_replaced(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(tuning.CACHE_VARIABLE, raising=False)
    folder = tuning.cache_folder()
    assert folder == tuning.cache_folder() == tuning.default_cache().parent
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    (said,) = caplog.messages
    assert said.startswith(f"nothing is remembered: {tmp_path}/file/lancet_kernels cannot be written")
    TunedCache(tuning.default_cache()).put([entry()])


def test_what_a_read_only_cache_folder_has_is_used(tmp_path, monkeypatch, caplog):
    TunedCache(tmp_path / "lancet_kernels" / "tuned.json").put([entry()])

    def refused(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuning.CACHE_VARIABLE, raising=False)
    assert list(TunedCache(tuning.default_cache()).entries().values()) == [entry()]
    assert "(Read-only file system)" in caplog.text


def test_a_named_cache_that_cannot_be_written_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "tuned.json"):
        with pytest.raises(UserError, match="expected a file that can be written; name another file"):
            TunedCache(path).check_writable()
