"""transformers' own tests of expert parallelism (`test_expert_parallel_mixin`, `test_fsdp_mixin`), with ours
in place of theirs, for every family that has a causal language model and an expert plan:

    LANCET_TRANSFORMERS_TESTS=build/transformers/tests \\
        python -m tests.lancet_kernels.transformers.mixins mixtral olmoe --implementation lancet

Their files are in the source distribution of transformers (`make build/transformers`), of the version that is
installed, and are nowhere copied. What they import beside, and it lacks, is here: ranks, and tiny models.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.ranks import RankError, RankPool
from tests.transformers_families import families, model_class, tiny_config

FOLDER = os.environ.get("LANCET_TRANSFORMERS_TESTS", "")
PACKAGE = "transformers_own_tests"
RANKS = 8
"""The most that a test needs."""
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
"""Widths that are whole in 16 bytes: torch's grouped product takes no others."""


class _Now:
    """What the test that runs now is for."""

    pool: RankPool
    implementation = "lancet"
    in_float32 = False
    """Is the model on one device, with which bfloat16 gradients are compared, computed in float32?"""


def own_module(name: str) -> ModuleType:
    """A module of their tests."""
    if PACKAGE not in sys.modules:
        package, helpers = ModuleType(PACKAGE), ModuleType(f"{PACKAGE}.distributed_testing_utils")
        package.__path__ = [FOLDER]
        helpers.__dict__.update(
            run_distributed=_run_distributed, _start_rank_processes=_start_rank_processes,
            _get_distributed_backend=lambda: "gloo", _get_distributed_device_type=lambda: "cpu",
            _get_rank_device=lambda rank: torch.device("cpu"), _set_rank_device=lambda rank: None,
        )  # fmt: skip
        sys.modules[PACKAGE], sys.modules[helpers.__name__] = package, helpers
    return importlib.import_module(f"{PACKAGE}.{name}")


def _run_distributed(world_size: int) -> Callable[..., Any]:
    return lambda function: lambda *arguments: _on_ranks(world_size, function, arguments, {})


def _start_rank_processes(_wrapper: Any, args: tuple, nprocs: int) -> None:
    _, function, arguments, by_name, *_, results_file = args
    error = None
    try:
        _on_ranks(nprocs, function, arguments, by_name)
    except RankError as failed:
        error = str(failed)
    with open(results_file, "w", encoding="utf-8") as file:
        json.dump({"error": error}, file)


def _on_ranks(ranks: int, function: Callable[..., Any], arguments: tuple, by_name: dict) -> None:
    # Workers import what they run, which is not in `__main__` there.
    from tests.lancet_kernels.transformers import mixins

    module = function.__module__.rpartition(".")[2]
    _Now.pool.run(
        mixins.one_rank, _Now.implementation, _Now.in_float32, module, function.__name__, arguments, by_name,
        ranks=ranks, timeout_s=900, collective_timeout_s=600,
    )  # fmt: skip


def one_rank(
    implementation: str, in_float32: bool, module: str, name: str, arguments: tuple, by_name: dict
) -> None:
    """A function of one of their modules, with an implementation of expert parallelism as "auto"."""
    import transformers
    from transformers.distributed.expert_parallel import EPImplementationInterface

    import lancet_kernels.transformers.expert_parallel  # noqa: F401  registers

    own, rank, of_name = own_module(module), dist.get_rank(), EPImplementationInterface._global_mapping
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    load = transformers.AutoModelForCausalLM.from_pretrained

    def loaded(folder: str, **options: Any) -> torch.nn.Module:
        on_one_device = "distributed_config" not in options
        wider = {"torch_dtype": torch.float32} if in_float32 and on_one_device else {}
        return load(folder, **options | wider)

    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.dict(of_name, auto=of_name[implementation]),
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", loaded),
    ):
        if hasattr(own, "_set_determinism"):
            own._set_determinism(own.SEED)
        try:
            getattr(own, name)(rank, *arguments, **by_name)
        finally:
            torch.use_deterministic_algorithms(False)


def own_tests() -> type[unittest.TestCase]:
    """Their test cases, of `OwnTests.family`."""
    experts = own_module("test_expert_parallel_mixin")
    slices, sharded = own_module("test_tensor_parallel_mixin"), own_module("test_fsdp_mixin")
    # All families, and more ranks than there are cores.
    experts.EP_DISTRIBUTED_TEST_MODEL_TYPES = sharded.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
    sharded._get_available_fsdp_workers = lambda: RANKS

    class OwnTests(
        experts.ExpertParallelTesterMixin,
        slices.TensorParallelTesterMixin,
        sharded.FSDPTesterMixin,
        unittest.TestCase,
    ):
        family = ""

        @property
        def model_tester(self) -> SimpleNamespace:
            return SimpleNamespace(
                get_config=partial(tiny_config, self.family, SIZES), causal_lm_class=model_class(self.family)
            )

    return OwnTests


def test_names() -> list[str]:
    """The names of those with experts: nine, and four with FSDP."""
    tests = own_tests()
    return [
        name
        for name in dir(tests)
        if name.startswith(("test_ep_", "test_fsdp2_expert_parallel"))
        or (name.startswith("test_hsdp") and name.endswith("expert_parallel"))
        # `parameterized` leaves None at the name of what it expands.
        if getattr(tests, name)
    ]


def tested_families() -> Iterator[str]:
    """Those with a causal language model and a plan for its experts."""
    for family in families():
        model = model_class(family)
        plan = getattr(model.config_class, "base_model_ep_plan", None) or {}
        if model.__name__.endswith("ForCausalLM") and "ep_dispatch_experts" in plan.values():
            yield family


def failure(pool: RankPool, family: str, name: str, implementation: str = "lancet") -> str:
    """What one of their tests says; "": it passes."""
    _Now.pool, _Now.implementation = pool, implementation
    case = own_tests()(name)
    case.family = family
    try:
        getattr(case, name)()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return next((x for x in reversed(lines) if "Error" in x or "differ" in x), lines[-1])
    return ""


def main() -> int:
    from tests.lancet_kernels.transformers.all_families import RESULTS

    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=[*tested_families()])
    parser.add_argument("--implementation", default="lancet")
    parser.add_argument(
        "--float32-reference",
        action="store_true",
        help="compare bfloat16 gradients with those of one device in float32; prints, saves nothing",
    )
    options = parser.parse_args()
    pool, names = RankPool(RANKS), test_names()
    if options.float32_reference:
        _Now.in_float32, names = True, [name for name in names if "bf16_grads" in name]
    for family in options.families:
        failed = {}
        for name in names:
            if line := failure(pool, family, name, options.implementation):
                failed[name] = line
                print(family, name, line, flush=True)
        if options.float32_reference:
            continue
        saved = json.loads(RESULTS.read_text(encoding="utf-8"))
        own = saved["families"].setdefault(family, {}).setdefault("mixins", {})
        own[options.implementation] = {"of": len(names), "failed": failed}
        RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
        print(family, len(names) - len(failed), "of", len(names), flush=True)
    pool.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
