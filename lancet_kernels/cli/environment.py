"""`lancet env`: what is installed on this machine, and which backends of this library can run on it.

Facts to paste into a bug report, those of `torch.utils.collect_env` first. No host name, user name, address,
path or key is among them: of the environment only variables of `_SHOWN` come with their values.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lancet_kernels import __version__
from lancet_kernels.files import json_text
from lancet_kernels.timing import cpu_cores

_MACHINE = (
    "os libc_version python_version torch_version cuda_compiled_version cuda_runtime_version "
    "nvidia_driver_version nvidia_gpu_models"
).split()
"""Facts that torch collects; the others have paths in them, or pages of text."""
_PACKAGES = (
    "triton numpy matplotlib transformers accelerate safetensors tokenizers "
    "nvidia-nvshmem-cu12 nvidia-nvshmem-cu13 nvshmem4py-cu12 nvshmem4py-cu13 cuda-python"
).split()
_SHOWN = (
    "LANCET_RHO LANCET_GAMMA LANCET_IOTA LANCET_FUSED_SMS TRITON_INTERPRET OMP_NUM_THREADS "
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_MAX_CONNECTIONS WORLD_SIZE LOCAL_WORLD_SIZE"
).split()
"""Numbers and switches: these cannot hold a name or a secret."""
_SET = ("LANCET_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "XDG_CACHE_HOME")
"""Prefixes of variables that are only listed as set, without their values."""


class Availability(NamedTuple):
    """Can a backend run here? reason: why it can, or what is missing."""

    works: bool
    reason: str


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "env",
        help="show versions, GPUs and backends, for a bug report",
        description="Show versions, GPUs, which backends can run here and why the others cannot. To paste "
        "into a bug report: no host names, user names, paths or secrets are in it.",
    )
    command.add_argument("--json", action="store_true", help="print the facts as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the facts. -> exit code."""
    facts = environment()
    print(json_text(facts) if arguments.json else as_text(facts))
    return 0


def environment() -> dict[str, Any]:
    """All facts, as JSON values. Starts no rank and runs no kernel."""
    shown = {name: os.environ[name] for name in _SHOWN if name in os.environ}
    hidden = sorted(name for name in os.environ if name.startswith(_SET) and name not in shown)
    return {
        "lancet_kernels": __version__,
        "machine": _machine(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "backends": {name: row._asdict() for name, row in backends().items()},
        "variables": shown | dict.fromkeys(hidden, "set"),
    }


def backends() -> dict[str, Availability]:
    """Every way in which a layer can run -> whether it can here."""
    return {
        "torch, CPU ranks (gloo)": _torch_on_cpu(),
        "torch, GPUs (NCCL)": _torch_on_gpus(),
        "fused, Triton's interpreter on the CPU": _fused_interpreted(),
        "fused, one GPU": _fused_on_gpu(),
        "fused, several GPUs": _fused_between_gpus(),
    }


def _torch_on_cpu() -> Availability:
    if dist.is_available() and dist.is_gloo_available():
        return Availability(True, "gloo")
    lack = "gloo" if dist.is_available() else "torch.distributed"
    return Availability(False, f"this torch was built without {lack}: one rank only")


def _torch_on_gpus() -> Availability:
    if lack := _no_gpu():
        return Availability(False, lack)
    if not (dist.is_available() and dist.is_nccl_available()):
        return Availability(False, "this torch was built without NCCL: one GPU only")
    return Availability(True, f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def _fused_interpreted() -> Availability:
    if lack := _no_triton():
        return Availability(False, lack)
    how = (
        "TRITON_INTERPRET=1 is set" if _interpreted() else "with TRITON_INTERPRET=1 set before Python starts"
    )
    return Availability(True, f"{how}; for proof, not for speed")


def _fused_on_gpu() -> Availability:
    if lack := _no_triton() or _no_gpu():
        return Availability(False, lack)
    if _interpreted():
        return Availability(False, "TRITON_INTERPRET=1 is set: kernels run on the CPU; unset it")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return Availability(False, f"compute capability {major}.{minor}, needs 8.0 or newer")
    return Availability(True, f"compute capability {major}.{minor}")


def _fused_between_gpus() -> Availability:
    one = _fused_on_gpu()
    if not one.works:
        return one
    if torch.cuda.device_count() < 2:
        return Availability(False, "one GPU on this machine; several ranks need a GPU each")
    # Imported here, because they import the kernels' modules.
    from lancet_kernels.kernels.symmetric import nvshmem, one_machine

    lack_of_torch = one_machine.missing(torch.device("cuda", 0))
    by_maker = {"torch": lack_of_torch, "NVSHMEM": nvshmem.missing()}
    usable = [maker for maker, lack in by_maker.items() if not lack]
    if not usable:
        return Availability(False, "; ".join(by_maker.values()))
    return Availability(True, f"by {' or '.join(usable)}; whether peers are reachable shows when ranks start")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _no_gpu() -> str:
    """Why torch can use no GPU; "" if it can."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build"
    return f"no CUDA device that torch {torch.__version__} can use; check the driver with nvidia-smi"


def _no_triton() -> str:
    """Why kernels cannot run at all; "" if Triton is here."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"no Triton ({error}); pip install triton (Linux only)"
    return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _machine() -> dict[str, object]:
    # Imported here, because only this command needs it.
    from torch.utils.collect_env import get_env_info

    facts = get_env_info()._asdict()
    # A line for each GPU, in one.
    facts["nvidia_gpu_models"] = (facts["nvidia_gpu_models"] or "none").replace("\n", "; ")
    return {name: facts[name] for name in _MACHINE} | {"cpu_cores": cpu_cores()}


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts for people, a line each."""
    backends = {
        f"{'yes' if row['works'] else 'no ':<3}  {name}": row["reason"]
        for name, row in facts["backends"].items()
    }
    sections = {
        "Machine": facts["machine"],
        "Packages": facts["packages"],
        "Backends": backends,
        "Environment": facts["variables"],
    }
    lines = [line for title, rows in sections.items() for line in _section(title, rows)]
    return "\n".join([f"lancet_kernels {facts['lancet_kernels']}", *lines])


def _section(title: str, rows: Mapping[str, object]) -> list[str]:
    if not rows:
        return [f"{title}: none"]
    width = max(map(len, rows))
    return [title, *(f"  {name:<{width}}  {'-' if value is None else value}" for name, value in rows.items())]
