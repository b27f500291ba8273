"""Files are replaced as a whole, or not at all."""

import json
import os

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, locked, write_json_atomically, write_text_atomically


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_json_atomically(path, {"loss": 1.5, "bad": float("nan"), "list": [float("inf"), 2]})
    assert json.loads(path.read_text()) == {"loss": 1.5, "bad": None, "list": [None, 2]}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("name", ["", "file/times.json", "file/deeper/times.json"])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path, name):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"file to write: got .*, expected a file that .*; name") as caught,
        locked(tmp_path / name),
    ):
        pass
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"got here \(no space left\),"), file_errors("here"):
        raise OSError(28, "no space left")
