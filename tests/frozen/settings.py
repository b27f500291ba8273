"""What is frozen (`test_frozen.py`): plans of settings that nothing measures, names and shapes of states,
public names, and the command's help. `python -m tests.frozen.settings` writes all of it to `frozen.json`
anew, with `names` behind it only names and help."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lancet_kernels
from lancet_kernels import Groups, MoELayer, PartitionOptions, PlanningOptions, optimize
from lancet_kernels import __main__ as main
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.layer.gpt2_moe import GPT2MoE, model_config
from lancet_kernels.predict.own_step import fake_ranks
from lancet_kernels.predict.simulate import Setting, simulate_setting
from lancet_kernels.schedules.plan import Plan
from tests.lancet_kernels.predict.small_models import DEEPSEEK, QWEN3, written
from tests.model_zoo import MODELS, Size, make_model

FILE = Path(__file__).with_name("frozen.json")

SIMULATED = {
    "gpt2-s, 16 p4de": (Setting("gpt2-s-moe", "p4de", 16, dtype="bfloat16", layers=4), None),
    "gpt2-s, 8 h100, dropless": (
        Setting(
            "gpt2-s-moe", "dgx-h100", 8, "topk", top_k=2, capacity_factor=None, dtype="bfloat16", layers=4
        ),
        None,
    ),
    "gpt2-l, 32 p3dn, whole batch": (Setting("gpt2-l-moe", "p3dn", 32, "batch-prioritized", layers=4), None),
    "gpt2-s, 64 b200, gshard": (Setting("gpt2-s-moe", "dgx-b200", 64, "gshard", layers=2), None),
    "gpt2-s, 16 p4de, padded": (Setting("gpt2-s-moe", "p4de", 16, padded=True, layers=2), None),
    "gpt2-s, 16 p4de, 5 GB": (Setting("gpt2-s-moe", "p4de", 16, batch=32, layers=4), 5.0),
    "gpt2-tiny, 2 local": (Setting("gpt2-tiny-moe", "local", 2), None),
}
"""The library's own models with every strategy, and the memory limit in GB."""

HF = {
    "qwen3, 16 h100": (QWEN3, "dgx-h100", 16, ["--accumulate", "4"]),
    "qwen3, 8 b200, fsdp": (QWEN3, "dgx-b200", 8, ["--fsdp", "--recompute", "selective"]),
    "deepseek, 16 h100, deepep": (DEEPSEEK, "dgx-h100", 16, ["--dispatch", "deepep", "--accumulate", "2"]),
}
"""Configurations of transformers, and options of `lancet plan --hf`."""


def slow() -> Cluster:
    """Ranks on which communication of small models takes as long as computation."""
    return replace(
        load_cluster("local"), intra_node_gb_per_s=0.05, inter_node_gb_per_s=0.05, launch_us=0.1,
        intra_node_latency_us=1.0, inter_node_latency_us=1.0, per_peer_us=0.0,
    )  # fmt: skip


def _optimized(
    name: str,
    strategy: str = "auto",
    ranks: int = 4,
    layers: int = 2,
    mesh: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
    **arguments: Any,
) -> Callable[[], Plan]:
    """Plans a model of the zoo on ranks that are not there. mesh: FSDP shards it over such ranks."""

    def plan() -> Plan:
        size = Size(8, 16, 64, vocab=130, num_experts=8, layers=layers, **(sizes or {}))
        with fake_ranks(ranks):
            model, inputs = make_model(name, size, torch.float32)
            if mesh:
                names = ("replica", "shard")[-len(mesh) :]
                arguments["shard"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            planning = PlanningOptions(PartitionOptions(), **(options or {}))
            planned = optimize(
                model, inputs, strategy=strategy, cluster=slow(), options=planning, **arguments
            )
            return planned.plan

    return plan


OPTIMIZED = {
    "gpt2": _optimized("gpt2"),
    "llama, lancet, 4 layers": _optimized("llama", "lancet", layers=4),
    "bert, top 2, dropless": _optimized("bert", sizes={"gate": "topk", "top_k": 2, "capacity_factor": None}),
    "llama, sums, 8 ranks": _optimized("llama-written-out", ranks=8, reduce_gradients="sum"),
    "gpt2, memory limit": _optimized("gpt2", options={"memory_limit_gb": 0.0021}),
    "gpt2, 4 microbatches": _optimized("gpt2", accumulate=4),
    "llama, pairs": _optimized("llama", "microbatches", accumulate=2),
    "llama, FSDP": _optimized("llama", mesh=(4,)),
    "gpt2, HSDP": _optimized("gpt2", mesh=(2, 2)),
    "bert, FSDP, 2 microbatches": _optimized("bert", mesh=(4,), accumulate=2),
}
"""Models of the zoo through `optimize`."""


def facts_of(plan: Plan) -> dict[str, Any]:
    """What a plan runs, as a digest, and what it predicts."""
    saved = plan.to_json()
    # As they were saved when this was frozen.
    saved["ranges"] = [{**r, "fillers": []} for r in saved["ranges"]]
    names = ("order", "ranges", "blocking", "pair")
    runs = json.dumps([saved.get(name) for name in names], sort_keys=True)
    return {
        "runs": hashlib.sha256(runs.encode()).hexdigest()[:16],
        "chosen": plan.report.chosen,
        "instructions": len(plan.order),
        "ranges": [f"{r.first} .. {r.last}: {r.parts}" for r in plan.ranges],
        "pair_ms": plan.report.pair_ms,
        "compared_ms": {name: p.iteration_ms for name, p in sorted(plan.report.compared.items())},
        **asdict(plan.report.predicted),
    }


def simulated(name: str) -> dict[str, Any]:
    """The plans of every strategy for one of `SIMULATED`."""
    setting, limit = SIMULATED[name]
    result = simulate_setting(setting, limit, PartitionOptions())
    facts = {strategy: facts_of(plan) for strategy, plan in result.plans.items()}
    return facts | {"impossible": sorted(result.impossible)}


def optimized(name: str) -> dict[str, Any]:
    """The plan of one of `OPTIMIZED`."""
    return facts_of(OPTIMIZED[name]())


def predicted(name: str) -> dict[str, Any]:
    """What `lancet plan --hf` says of one of `HF`."""
    from lancet_kernels.cli.options import to_options
    from lancet_kernels.cli.plan_command import PlanOptions
    from lancet_kernels.predict.answer import answer

    config, cluster, gpus, options = HF[name]
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), config)
        arguments = main._parser().parse_args(["plan", "--hf", path, "--sequence", "128", *options])
        figures = answer(to_options(PlanOptions, arguments).question(cluster, gpus)).to_json()
    for strategy in figures["strategies"].values():
        del strategy["busy_ms"], strategy["binds"]  # they are parts of compute_ms, and the largest term
    return {name: figures[name] for name in ("memory_limit_gib", "strategies", "impossible")}


def states() -> dict[str, dict[str, str]]:
    """Names and shapes in the state dicts of models and layers."""
    models: dict[str, nn.Module] = {name: make_model(name)[0] for name in MODELS}
    models |= {"GPT2MoE": GPT2MoE(model_config("gpt2-tiny-moe"), Groups())}
    for gate in ("switch", "topk", "sigmoid", "hash"):
        for activation, bias in (("gelu", True), ("swiglu", False)):
            layer = MoELayer(8, 16, 4, top_k=2 if gate in ("topk", "sigmoid") else 1, gate=gate,
                             activation=activation, bias=bias)  # fmt: skip
            models[f"MoELayer, {gate}, {activation}"] = layer
    model, inputs = make_model("gpt2", Size(layers=2))
    models["optimize(gpt2)"] = optimize(model, inputs, strategy="lancet", cluster="local")
    return {
        name: {k: "x".join(map(str, v.shape)) for k, v in m.state_dict().items()}
        for name, m in models.items()
    }


def names() -> dict[str, str]:
    """What can be imported from the package, with signatures."""
    public = {name: getattr(lancet_kernels, name) for name in sorted(lancet_kernels.__all__)}
    return {name: str(inspect.signature(one)) for name, one in public.items()}


def helps() -> dict[str, list[str]]:
    """The lines of the command's help, and of each subcommand's."""
    with mock.patch.dict("os.environ", COLUMNS="100"):
        parser = main._parser()
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        own = {"lancet": parser, **commands.choices}
        return {name: one.format_help().splitlines() for name, one in own.items()}


def everything() -> dict[str, Any]:
    """All that is frozen."""
    return {
        "simulated": _each(simulated, SIMULATED),
        "optimized": _each(optimized, OPTIMIZED),
        "predicted": _each(predicted, HF),
        "states": states(),
        "names": names(),
        "help": helps(),
    }


def _each(facts: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
    result = {}
    for name in names:
        print(name, file=sys.stderr, flush=True)
        result[name] = facts(name)
    return result


if __name__ == "__main__":
    frozen = json.loads(FILE.read_text()) if FILE.exists() else {}
    chosen = {"names": names(), "help": helps()} if sys.argv[1:] == ["names"] else everything()
    FILE.write_text(json.dumps(frozen | chosen, indent=1, sort_keys=True) + "\n")
