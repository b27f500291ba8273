"""Training steps of small transformers models, original and converted, in turn, on CPU ranks:

    python -m bench.cpu.converted       # three models of widths 32, 64, 256 on 1 and 2 ranks
    python -m bench.cpu.converted --ranks 1 --widths 32,1024 --contenders transformers,convert

    transformers    the original, all experts on every rank; on several ranks in DistributedDataParallel
    convert         converted, on several ranks in `lancet_kernels.ddp`
    none, auto      converted and optimized with that strategy

Random weights, one batch of random tokens for each rank, float32, one thread for each rank. A step is
forward, backward and the sums of gradients. Ratios to `transformers` are medians of the ratios of each round,
so that drift of the machine's speed cancels.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels import CausalLMStep, convert, ddp, optimize
from lancet_kernels.cli.options import names_among
from lancet_kernels.files import write_json_atomically
from lancet_kernels.measure.launch import launch, report_errors, start_ranks, under_launcher
from lancet_kernels.measure.step_bench import chosen, iteration_ms
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.timing import in_turn

LAYERS, EXPERTS, TOP_K, VOCABULARY, SEQUENCES, TOKENS = 4, 8, 2, 256, 4, 64
TRANSFORMERS, CONVERT = "transformers", "convert"
CONTENDERS = (TRANSFORMERS, CONVERT, "none", "auto")
WARMUP = 3


def _causal_lm(classes: str, width: int, **sizes: object) -> nn.Module:
    """A model of transformers by the common prefix of its classes."""
    import transformers

    config = getattr(transformers, f"{classes}Config")(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, num_experts_per_tok=TOP_K, max_position_embeddings=TOKENS,
        pad_token_id=0, eos_token_id=None, bos_token_id=None, **sizes,
    )  # fmt: skip
    return getattr(transformers, f"{classes}ForCausalLM")(config)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "Qwen3-MoE": lambda width: _causal_lm(
        "Qwen3Moe", width, moe_intermediate_size=width, num_experts=EXPERTS, head_dim=width // 4,
        norm_topk_prob=True,
    ),
    "Mixtral": lambda width: _causal_lm("Mixtral", width, intermediate_size=width, num_local_experts=EXPERTS),
    "OLMoE": lambda width: _causal_lm("Olmoe", width, intermediate_size=width, num_experts=EXPERTS),
}  # fmt: skip
"""Models by name, from their width, which is also the hidden width of an expert."""


def contenders_of(name: str, width: int, which: Sequence[str]) -> tuple[dict[str, nn.Module], dict]:
    """The steps to measure on this rank, and their batch. Collective."""
    torch.manual_seed(0)
    original = MODELS[name](width)
    own = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    ids = torch.randint(1, VOCABULARY, (SEQUENCES, TOKENS), generator=own)
    batch = {"input_ids": ids, "labels": ids}
    converted = copy.deepcopy(original)
    convert(converted)

    def contender(kind: str) -> nn.Module:
        step = CausalLMStep(original if kind == TRANSFORMERS else copy.deepcopy(converted))
        if kind not in (TRANSFORMERS, CONVERT):
            return optimize(step, batch, strategy=kind)
        if not dist.is_initialized():
            return step
        return nn.parallel.DistributedDataParallel(step) if kind == TRANSFORMERS else ddp(step)

    return {kind: contender(kind) for kind in which}, batch


def measured(name: str, width: int, which: Sequence[str], rounds: int) -> dict[str, object]:
    """Medians in ms, and of the ratios to the first contender in each round; a rank's time is that of the
    slowest. Collective."""
    steps, batch = contenders_of(name, width, which)

    def one(kind: str) -> float:
        elapsed_ms = torch.tensor(iteration_ms(steps[kind], batch))
        if dist.is_initialized():
            dist.all_reduce(elapsed_ms, dist.ReduceOp.MAX)
        return float(elapsed_ms)

    times = in_turn(which, one, rounds, WARMUP, first_changes=True)
    first, auto = times[which[0]], steps.get("auto")
    return {
        "model": name,
        "width": width,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "milliseconds": {kind: round(statistics.median(ms), 3) for kind, ms in times.items()},
        f"over_{which[0]}": {
            kind: round(statistics.median(own / other for own, other in zip(ms, first, strict=True)), 4)
            for kind, ms in times.items()
        },
        "auto_chose": chosen(auto.plan) if isinstance(auto, OptimizedModule) else None,
    }


def _row(case: dict) -> str:
    ratios = next(value for key, value in case.items() if key.startswith("over_"))
    cells = [f"{case['milliseconds'][kind]:>10.1f} {ratio:>5.3f}" for kind, ratio in ratios.items()]
    choice = f"   {case['auto_chose']}" if case["auto_chose"] else ""
    return f"{case['model']:<10}{case['width']:>6}{case['ranks']:>6}" + "".join(cells) + choice


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    """Print a table. -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=names_among(MODELS), default=[*MODELS])
    parser.add_argument("--widths", type=_numbers, default=[32, 64, 256])
    parser.add_argument("--ranks", type=_numbers, default=[1, 2])
    parser.add_argument("--contenders", type=names_among(CONTENDERS), default=[*CONTENDERS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    if under_launcher():
        return _measure_here(options)
    arguments = ["-m", "bench.cpu.converted", *(sys.argv[1:] if argv is None else argv)]
    kinds = "".join(f"{kind:>16}" for kind in options.contenders)
    print(f"{'model':<10}{'width':>6}{'ranks':>6}{kinds}   ms, and over {options.contenders[0]}")
    cases: list[dict] = []
    for ranks in options.ranks:
        launch(ranks, arguments)
        if options.json:
            # The ranks have written only the cases of this number of ranks.
            cases += json.loads(Path(options.json).read_text())["cases"]
    if options.json:
        conditions = {
            "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "tokens": SEQUENCES * TOKENS,
            "dtype": "float32", "rounds": options.rounds, "threads_per_rank": 1, "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0], "torch": torch.__version__,
        }  # fmt: skip
        write_json_atomically(Path(options.json), conditions | {"cases": cases})
    return 0


def _measure_here(options: argparse.Namespace) -> int:
    rank = start_ranks("cpu", 300.0)
    cases = []
    for name in options.models:
        for width in options.widths:
            cases.append(measured(name, width, options.contenders, options.rounds))
            if rank.rank == 0:
                print(_row(cases[-1]), flush=True)
    if options.json and rank.rank == 0:
        write_json_atomically(Path(options.json), {"cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
