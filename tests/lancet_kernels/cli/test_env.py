"""`lancet env`: the facts are there, and nothing that could tell who or where."""

import getpass
import json
import os
import socket
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory
from torch.utils.collect_env import get_env_info

import lancet_kernels
from lancet_kernels.__main__ import main
from lancet_kernels.cli.environment import as_text, environment


@pytest.fixture(autouse=True, scope="module")
def collected_once() -> Iterator[None]:
    """What torch asks other programs takes a second."""
    with mock.patch("torch.utils.collect_env.get_env_info", lru_cache(get_env_info)):
        yield


def test_json_has_versions_and_backends(capsys: pytest.CaptureFixture) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"]["torch_version"] == torch.__version__
    assert facts["backends"]["torch, CPU ranks (gloo)"]["works"] == torch.distributed.is_gloo_available()
    assert facts["backends"]["torch, GPUs (NCCL)"]["works"] == torch.cuda.is_available()


def test_says_neither_who_nor_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "wire-to-bigcluster")
    monkeypatch.setenv("MASTER_ADDR", "head.bigcluster")
    monkeypatch.setenv("LANCET_TUNED", "/data/jane/tuned.json")
    monkeypatch.setenv("LANCET_RHO", "4")
    text = as_text(environment())
    assert "LANCET_RHO" in text
    assert environment()["variables"]["NCCL_SOCKET_IFNAME"] == "set"
    for secret in ("bigcluster", "jane", socket.gethostname(), str(Path.home()) + os.sep):
        assert secret not in text
    if len(user := getpass.getuser()) > 4:
        assert user not in text


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = environment()["backends"]
    assert rows["torch, CPU ranks (gloo)"] == {
        "works": False,
        "reason": "this torch was built without gloo: one rank only",
    }
    assert "CUDA" in rows["fused, one GPU"]["reason"]


def test_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine with two GPUs answers torch."""
    answers = {"is_available": True, "device_count": 2, "get_device_capability": (9, 0)}
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed._symmetric_memory, "get_backend", lambda device: "CUDA")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    collected = torch.utils.collect_env.get_env_info()._replace(nvidia_gpu_models="GPU 0: H100\nGPU 1: H100")
    monkeypatch.setattr("torch.utils.collect_env.get_env_info", lambda: collected)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    facts = environment()
    assert facts["machine"]["nvidia_gpu_models"] == "GPU 0: H100; GPU 1: H100"
    assert facts["backends"]["torch, GPUs (NCCL)"] == {"works": True, "reason": "NCCL 2.27.3"}
    assert facts["backends"]["fused, one GPU"]["works"]
    several = facts["backends"]["fused, several GPUs"]
    assert several["works"]
    assert several["reason"].startswith("by torch; ")
    assert "yes  fused, one GPU                          compute capability 9.0\n" in as_text(facts)


def test_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"lancet {lancet_kernels.__version__}\n")
