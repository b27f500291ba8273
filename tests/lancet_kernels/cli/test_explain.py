"""`lancet explain`: a saved plan, and the difference of two."""

import json
import os
import signal
import sys

import pytest

from lancet_kernels.__main__ import main

TINY = ["plan", "--model", "gpt2-tiny-moe", "--gpus", "8", "--most-parts", "2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for strategy in ("none", "tutel"):
        assert main([*TINY, "--gate", "hash", "--strategy", strategy, "--save", str(folder / strategy)]) == 0
    return [str(folder / name) for name in ("none", "tutel")]


@pytest.mark.long
def test_a_plan_and_the_difference_of_two(files, capsys):
    assert main(["explain", files[0]]) == 0
    assert capsys.readouterr().out.startswith("Plan `none` for gpt2-tiny-moe, 8 GPUs")
    assert main(["explain", files[0], files[0]]) == 0
    assert capsys.readouterr().out.endswith("\n\nBoth plans run the same.\n")
    assert main(["explain", *files]) == 0
    out = capsys.readouterr().out
    assert "strategy: none, and tutel" in out
    assert main(["explain", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["different"] == [line for line in out.splitlines() if line][3:]
    assert found["plans"][files[1]]["strategy"] == "tutel"
    assert not found["runs_the_same"]


@pytest.mark.parametrize("arguments", [["--version"], ["explain", "--help"]])
def test_a_reader_that_has_enough_ends_it_in_silence(arguments, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(arguments) == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["explain", "--help"]])
def test_a_full_disk_behind_standard_output_is_one_line(arguments, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 1
    assert capfd.readouterr().err == "lancet: standard output: No space left on device\n"


def test_a_file_that_is_no_plan(refused, tmp_path):
    assert "missing.json" in refused("explain", tmp_path / "missing.json")
