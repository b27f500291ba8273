"""The options of `lancet train`, and which of them do not fit together; and the bytes of text to train on.

A sample's place in the corpus depends on the seed, the step and its index in the global batch, on nothing
else: any number of ranks reads the same global batch, and a resumed run reads what the killed one would have.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lancet_kernels.cli.options import (
    PlanningFlags,
    non_negative_float,
    non_negative_int,
    option,
    positive_float,
    positive_float_or_none,
    positive_int,
    probability,
)
from lancet_kernels.errors import UserError
from lancet_kernels.layer.expert_layer import BACKENDS
from lancet_kernels.layer.gpt2_moe import BENCH_MODEL, BENCH_VOCAB, MODELS, ModelConfig, model_config
from lancet_kernels.ops.moe.gates import GATES, parse_gate
from lancet_kernels.ops.random import signed, splitmix64
from lancet_kernels.schedules import STRATEGY_NAMES

# Not shipped with the interpreter, or (tests and their data) not always installed, or not plain source.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
# One file in this many, and the same share of a single file, is for validation.
VALIDATION_SHARE = 20
VOCABULARY = 256


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as tokens, 1-D arrays of uint8."""

    name: str
    train: np.ndarray
    validation: np.ndarray


def load_corpus(path: str | Path | None = None) -> Corpus:
    """Read a text file, a folder of them, or (no path) the Python sources of the running interpreter.

    In a folder every regular text file below it counts, in the order of the names; hidden files and folders
    and binary files (those with a NUL byte) are skipped. Every 20th file is for validation, or the last if
    there are fewer; of a single file the last 5 % of the tokens. Files are joined by a newline.

    Raises UserError for a path that is missing, unreadable or without text.
    """
    name, files = _find_files(path)
    texts = [text for file in files if (text := _read_text(file))]
    if not texts:
        raise UserError(
            "data",
            got=f"{name}, which has no text",
            expected="a text file, or a folder with text files",
            do="give another path",
        )
    if len(texts) == 1:
        tokens = _tokens(texts)
        cut = len(tokens) - len(tokens) // VALIDATION_SHARE
        return Corpus(name, tokens[:cut], tokens[cut:])
    every = min(VALIDATION_SHARE, len(texts))
    train = [text for number, text in enumerate(texts, 1) if number % every]
    return Corpus(name, _tokens(train), _tokens(texts[every - 1 :: every]))


def batch_of_rank(
    tokens: np.ndarray, *, seed: int, step: int, batch: int, sequence: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, each `[batch, sequence]` int64, targets one token on.

    Rank r reads rows r * batch to (r + 1) * batch of the global batch. Where a row starts is a hash of (seed,
    step, row). The tokens hold at least one sequence and its targets.
    """
    keys = splitmix64(splitmix64(torch.tensor([signed(seed)])) ^ step)
    hashes = splitmix64(keys ^ torch.arange(rank * batch, (rank + 1) * batch)).numpy().view(np.uint64)
    starts = (hashes % np.uint64(len(tokens) - sequence)).astype(np.int64)
    window = torch.from_numpy(tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int64))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _find_files(path: str | Path | None) -> tuple[str, list[Path]]:
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in _walk(library, skip=NOT_LIBRARY) if file.suffix == ".py"]
        return f"python-stdlib-{sys.version_info.major}.{sys.version_info.minor}", files
    place = Path(path)
    return str(path), list(_walk(place)) if place.is_dir() else [place]


def _walk(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The regular files below `folder`, folder by folder, sorted: the same order on every file system."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _read_text(file: Path) -> bytes:
    """The bytes of a text file; none of a binary one."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UserError(
            "data file",
            got=f"{file} ({error.strerror})",
            expected="a readable file",
            do="check the path and its permissions",
        ) from error
    return b"" if b"\0" in text else text


def _tokens(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(texts), dtype=np.uint8)


@dataclass(frozen=True)
class TrainOptions(PlanningFlags):
    """The options of `lancet train`."""

    model: str = option("gpt2-tiny-moe", f"one of {', '.join(MODELS)}", metavar="NAME")
    ranks: int = option(
        2, "processes to start on this machine; under torchrun the number that it started", parse=positive_int
    )
    gate: str = option(
        "switch", f"{', '.join(GATES)}; options as in 'topk(renormalize=True)'", metavar="GATE"
    )
    top_k: int | None = option(None, "experts per token (default: 2 for gshard, else 1)", parse=positive_int)
    experts: int | None = option(
        None, "total number of experts (default: 2 per rank of an expert group)", parse=positive_int
    )
    expert_ranks: int | None = option(
        None,
        "ranks in an expert group; several groups hold the same experts (default: all ranks)",
        parse=positive_int,
    )
    capacity_factor: float | None = option(
        1.25,
        "tokens that an expert takes, relative to an even share; none: dropless",
        parse=positive_float_or_none,
    )
    data: str | None = option(
        None,
        "text file or folder, of which each byte is a token (default: the sources of Python's library)",
        metavar="PATH",
    )
    steps: int = option(300, "total number of training steps", parse=positive_int)
    batch: int = option(8, "sequences per rank and step", parse=positive_int)
    sequence: int | None = option(None, "tokens per sequence (default: the model's)", parse=positive_int)
    optimizer: str = option("adamw", "adamw, or sgd with momentum as in the paper", choices=("adamw", "sgd"))
    lr: float | None = option(
        None, "peak learning rate (default: 1e-3 for adamw, 0.1 for sgd)", parse=positive_float
    )
    momentum: float = option(0.9, "momentum of sgd", parse=non_negative_float)
    weight_decay: float = option(0.0, "weight decay of the optimizer", parse=non_negative_float)
    warmup: int = option(
        20, "steps in which the learning rate grows linearly to its peak", parse=non_negative_int
    )
    clip: float | None = option(
        1.0, "largest norm of the whole gradient; none: no clipping", parse=positive_float_or_none
    )
    balance_weight: float = option(0.01, "weight of the load-balance loss", parse=non_negative_float)
    z_weight: float = option(0.0, "weight of the router's z-loss", parse=non_negative_float)
    bias_rate: float = option(
        0.001, "update rate of the sigmoid gate's correction bias", parse=non_negative_float
    )
    dropout: float = option(
        0.0, "dropout probability at embedding, attention and feed-forward output", parse=probability
    )
    seed: int = option(0, "seed of weights, data order and dropout", parse=non_negative_int)
    validation_batches: int = option(8, "number of batches for the validation loss", parse=positive_int)
    strategy: str = option(
        "auto",
        "how all-to-alls are hidden; auto: as is fastest, measured; none: they are waited for",
        choices=STRATEGY_NAMES,
    )
    plan: str | None = option(
        None, "use this plan, the plan.json of another run of the same step", metavar="FILE"
    )
    backend: str = option(
        "torch",
        "fused: MoE layers run as persistent kernels where the plan says so (GPUs, or TRITON_INTERPRET=1)",
        choices=BACKENDS,
    )
    link_gbps: float | None = option(
        None, "emulate a link of this many Gbit/s: pace every all-to-all (CPU ranks)", parse=positive_float
    )
    device: str = option(
        "auto", "where to compute; auto: cuda if there is one", choices=("auto", "cpu", "cuda")
    )
    timeout: float = option(300.0, "seconds that a rank waits for another rank", parse=positive_float)
    checkpoint_every: int = option(
        100,
        "steps between checkpoints; the last step gets one, too; 0: only when the run is told to stop",
        parse=non_negative_int,
    )
    log_every: int = option(10, "steps between lines on standard error; 0: none", parse=non_negative_int)
    output: str | None = option(
        None, "new folder of this run (default: runs/<date and time>)", metavar="FOLDER"
    )

    def chosen_device(self) -> str:
        """ "cpu" or "cuda"."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


def build_config(options: TrainOptions, ranks: int) -> ModelConfig:
    """The model's configuration. Raises: UserError for options that do not fit together."""
    sharing = options.expert_ranks or ranks
    if ranks % sharing:
        raise UserError(
            "expert-ranks",
            got=sharing,
            expected=f"a divisor of the {ranks} ranks",
            do="change --expert-ranks or --ranks",
        )
    gate = parse_gate(options.gate)
    top_k = options.top_k or (2 if gate.name == "gshard" else 1)
    config = model_config(
        options.model,
        vocab=BENCH_VOCAB if options.model == BENCH_MODEL else VOCABULARY,
        num_experts=options.experts or 2 * sharing,
        top_k=top_k,
        gate=str(gate),
        capacity_factor=options.capacity_factor,
        dropout=options.dropout,
        # A seed that no dropout uses must not prevent resuming.
        dropout_seed=options.seed if options.dropout else 0,
    )
    if options.sequence is not None and options.sequence > config.sequence:
        raise UserError(
            "sequence",
            got=options.sequence,
            expected=f"at most {config.sequence}",
            do=f"{config.name} has no more",
        )
    if config.num_experts % sharing:
        raise UserError(
            "experts",
            got=config.num_experts,
            expected=f"a multiple of the {sharing} ranks that share them",
            do="change --experts, --expert-ranks or --ranks",
        )
    gate.check(config.num_experts, top_k)
    gate.check_capacity_factor(config.capacity_factor)
    return config


def check_options(options: TrainOptions, ranks: int) -> None:
    """Check the options before a rank starts. Raises: UserError."""
    build_config(options, ranks)
    if options.data is not None and not Path(options.data).exists():
        raise UserError("data", got=options.data, expected="an existing path", do="check --data")
    if options.plan is not None and (options.strategy == "none" or not Path(options.plan).is_file()):
        raise UserError(
            "plan",
            got=f"{options.plan} with strategy {options.strategy}",
            expected="a plan file, and another strategy than none",
            do="check --plan and --strategy",
        )
    if options.backend == "fused":
        # Only here: the kernels need Triton, which not every machine has.
        from lancet_kernels.optimization.planning import FusedChoice
        from lancet_kernels.schedules.strategies import PlanningOptions

        FusedChoice(options.strategy, PlanningOptions(), "auto", None, torch.device(options.chosen_device()))
    if options.link_gbps is not None and options.chosen_device() == "cuda":
        raise UserError(
            "link-gbps", got="device cuda", expected="cpu", do="only CPU ranks can share an emulated link"
        )
