"""Bytes of text to train a language model on, and which of them a rank reads at a step.

A sample's place in the corpus depends on the seed, the step and its index in the global batch, on nothing
else: any number of ranks reads the same global batch, and a resumed run reads what the killed one would have.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.random import signed, splitmix64

# Not part of what the interpreter ships, or (tests and their data) not always installed, or not plain source.
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
    step, row). Raises UserError if the tokens do not hold a sequence.
    """
    check_length(tokens, sequence, "training")
    keys = splitmix64(splitmix64(torch.tensor([signed(seed)])) ^ step)
    hashes = splitmix64(keys ^ torch.arange(rank * batch, (rank + 1) * batch)).numpy().view(np.uint64)
    starts = (hashes % np.uint64(len(tokens) - sequence)).astype(np.int64)
    window = torch.from_numpy(tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int64))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def check_length(tokens: np.ndarray, sequence: int, part: str) -> None:
    """Raise UserError unless `tokens` hold one sequence and its targets; `part`: "training", "validation"."""
    if len(tokens) < sequence + 1:
        raise UserError(
            f"{part} data",
            got=f"{len(tokens)} tokens",
            expected=f"at least {sequence + 1} for sequences of {sequence}",
            do="give more text or choose shorter sequences",
        )


def _find_files(path: str | Path | None) -> tuple[str, list[Path]]:
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in _walk(library, skip=NOT_LIBRARY) if file.suffix == ".py"]
        return f"python-stdlib-{sys.version_info.major}.{sys.version_info.minor}", files
    place = Path(path)
    if not place.exists():
        raise UserError(
            "data path",
            got=f"{path}, which does not exist",
            expected="a text file or a folder",
            do="check the path",
        )
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
            do="check its permissions",
        ) from error
    return b"" if b"\0" in text else text


def _tokens(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(texts), dtype=np.uint8)
