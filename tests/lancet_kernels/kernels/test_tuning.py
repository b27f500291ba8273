"""The cache of tuned configurations, and who looks where in which order."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import tuning
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.moe.row_config import RowConfig
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.tuned_entry import MEASURED, Entry, config_fields
from lancet_kernels.kernels.tuning import TunedCache, tuned
from tests.tuned_cache import GPU
from tests.tuned_cache import cache as cache

TILE = RowConfig(4, 512, 8)
SHAPE = (768,)


def entry(config=TILE, how=MEASURED, device=GPU, kind="permute", shape=SHAPE) -> Entry:
    return Entry(kind, shape, "bfloat16", device, config_fields(config), how, 1.0, 1.5, "3.6.0", "2026-11-21")


def look(kind="permute", shape=SHAPE, dtype=torch.bfloat16):
    return tuned(kind, shape, dtype, torch.device("cuda", 0))


def test_nothing_is_found_where_nothing_was_tuned(cache) -> None:
    assert look() is None


def test_on_a_cpu_nothing_is_ever_found(cache) -> None:
    cache.put([entry()])
    assert tuned("permute", SHAPE, torch.bfloat16, torch.device("cpu")) is None


def test_only_what_was_tuned_is_found(cache) -> None:
    cache.put([entry()])
    assert look() == TILE
    assert look(shape=(769,)) is None
    assert look(dtype=torch.float16) is None
    assert look(kind="combine") is None


def test_the_package_goes_before_the_user(cache) -> None:
    mine, shipped = (RowConfig(n, 256) for n in (4, 8))
    cache.put([entry(mine)])
    assert look() == mine
    TunedCache(tuning.PACKAGE_TABLE).put([entry(shipped)])
    assert look() == shipped


def test_what_older_versions_modelled_is_ignored_without_a_word_and_replaced(cache) -> None:
    other = RowConfig(8, 256)
    modelled = entry(how="modelled", device="sm_90"), entry(other, how="modelled")
    cache.put([*modelled, entry(kind="combine")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(cache.entries()) == [entry(kind="combine").key]
        assert look() is None
        cache.put([entry()])
        assert look() == TILE
    assert "modelled" not in cache.path.read_text()


def test_a_configuration_that_this_gpu_cannot_run_is_ignored_with_a_warning(cache) -> None:
    kind, shape = "overlap", (768, 3072, "gelu", 1)
    cache.put([entry(OverlapConfig(GemmConfig(256, 256, 128, 4, 5)), kind=kind, shape=shape)])
    with pytest.warns(UserWarning, match="cannot run on sm_90"):
        assert look(kind, shape) is None


@pytest.mark.parametrize(
    ("kind", "shape", "config"),
    [
        (
            "overlap",
            (768, 3072, "gelu", 1),
            OverlapConfig(GemmConfig(64, 128, 64, 4, 4), programs=132, tma=True),
        ),
        ("permute", (768,), RowConfig(4, 512, 8)),
    ],
)
def test_every_sort_of_configuration_comes_back_as_it_went(cache, kind, shape, config) -> None:
    cache.put([entry(config, kind=kind, shape=shape)])
    assert look(kind, shape) == config


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": "other", "version": 1, "entries": {}}', "\x00\x01", '{"version": 1}',
     '{"format": "lancet-tuned-configurations", "version": 99, "entries": {}}',
     '{"format": "lancet-tuned-configurations", "version": 1, "entries": 5}', "[" * 100000],
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
    assert look() == TILE


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"block_tokens": 64}},
        {"config": {**config_fields(TILE), "extra": 1}},
        {"config": {**config_fields(TILE), "block_width": "64"}},
        {"config": None},
        {"how": "guessed"},
        {"milliseconds": float("nan")},
        {"milliseconds": "1"},
        {"kind": "routing"},
        {"shape": [1, 2]},
        {"shape": [769]},
        {"unknown": 1},
    ],
)
def test_one_corrupt_entry_is_ignored_with_a_warning_and_the_others_stay(cache, change) -> None:
    good = entry(kind="combine")
    cache.put([good, entry()])
    data = json.loads(cache.path.read_text())
    data["entries"][entry().key] |= change
    cache.path.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="is ignored"):
        assert TunedCache(cache.path).entries() == {good.key: good}


def test_a_killed_writer_leaves_no_lock(cache) -> None:
    cache.put([entry()])
    assert cache.path.with_name(".tuned.json.lock").exists()
    cache.put([replace(entry(), shape=(16,))])
    assert len(cache.entries()) == 2


def test_the_launchers_ask_for_the_kinds_and_shapes_that_are_tuned(monkeypatch) -> None:
    """A task nobody looks up would be tuned for nothing."""
    from lancet_kernels.kernels import overlap
    from lancet_kernels.kernels.moe import permute, routing
    from lancet_kernels.measuring.fused_pass import FusedPasses
    from lancet_kernels.tuning.tune_tasks import make_tasks
    from lancet_kernels.tuning.workloads import Workload

    asked = set()

    def ask(kind, shape, dtype, device):
        asked.add((kind, shape, dtype))

    for module in (overlap, permute, routing):
        monkeypatch.setattr(module, "tuned", ask)
    w = Workload("tiny", 12, 16, 32, 4, 2, "swiglu")
    tasks = make_tasks([w], torch.float32)
    device = torch.device("cpu")
    for task in tasks:
        if task.kind != "overlap":
            task.tunable.runner(task, device)(None)()
    FusedPasses(w, torch.float32, device)
    # It asks on a GPU only.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    with pytest.raises(AttributeError):
        overlap.default_overlap_config(16, 32, "swiglu", torch.float32, torch.device("cuda", 0))
    assert {(task.kind, task.shape, task.dtype) for task in tasks} <= asked


def test_no_table_ships_before_one_is_measured() -> None:
    entries = TunedCache(Path(tuning.__file__).with_name("tuned.json")).entries()
    assert all(e.how == MEASURED for e in entries.values())


def test_reading_a_sound_file_warns_of_nothing(cache) -> None:
    cache.put([entry()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert look() == TILE


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
