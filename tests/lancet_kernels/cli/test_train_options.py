import sys
import sysconfig

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.cli.train_options import batch_of_rank, load_corpus
from lancet_kernels.errors import UserError
from tests.examples import examples
from tests.moe_reference import MASK, splitmix


def text_of(tokens):
    return bytes(tokens.tolist()).decode()


def write_files(folder, texts):
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    ("texts", "train", "validation"),
    [
        # Of one text its last twentieth, of a few texts the last, of many every twentieth is for validation.
        ({"text.txt": "0123456789" * 10, "b.bin": b"\0"}, "0123456789" * 9 + "01234", "56789"),
        (
            {
                "b.txt": "bee",
                "a.txt": "ay",
                "sub/z.txt": "zed",
                "sub/c.bin": b"\0binary",
                ".git/x": "hidden",
                "empty": "",
            },
            "ay\nbee",
            "zed",
        ),
        (
            {f"{index:02d}.txt": f"<{index:02d}>" for index in range(1, 46)},
            "\n".join(f"<{index:02d}>" for index in range(1, 46) if index not in (20, 40)),
            "<20>\n<40>",
        ),
    ],
    ids=["one text", "a few", "many"],
)
def test_texts_of_a_folder_are_for_training_and_validation(tmp_path, texts, train, validation):
    write_files(tmp_path, texts)
    corpus = load_corpus(tmp_path)
    assert (corpus.name, corpus.train.dtype) == (str(tmp_path), np.uint8)
    assert (text_of(corpus.train), text_of(corpus.validation)) == (train, validation)


def test_default_is_the_library_without_tests_and_packages(tmp_path, monkeypatch):
    skipped = ["site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"]
    write_files(tmp_path, {f"{folder}/x.py": "no" for folder in skipped})
    write_files(tmp_path, {"ast.py": "A", "json/tool.py": "J", "json/tests/x.py": "no", "LICENSE.txt": "no"})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus()
    assert corpus.name == f"python-stdlib-{sys.version_info.major}.{sys.version_info.minor}"
    assert (text_of(corpus.train), text_of(corpus.validation)) == ("A", "J")


def test_the_real_library_is_megabytes_of_python():
    corpus = load_corpus()
    text = bytes(corpus.train)
    assert len(text) > 3_000_000
    assert b"\0" not in text
    assert text.count(b"\nimport ") > 500
    assert 0.02 < len(corpus.validation) / len(text) < 0.1


def test_bad_inputs_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"a\0b")
    for path, message in [
        ("missing", r"missing \(No such file or directory\)"),
        ("empty", "empty, which has no text"),
        ("binary", "binary, which has no text"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            load_corpus(str(tmp_path / path))
        assert "\n" not in str(caught.value)


def test_rows_start_where_the_hash_says():
    tokens = np.arange(1000, dtype=np.uint16)
    inputs, targets = batch_of_rank(tokens, seed=-1, step=7, batch=3, sequence=4, rank=1)
    starts = [splitmix(splitmix(splitmix(MASK) ^ 7) ^ row) % 996 for row in (3, 4, 5)]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[start + place for place in range(4)] for start in starts]
    assert torch.equal(targets, inputs + 1)


@examples(50)
@given(
    seed=st.integers(-(2**70), 2**70),
    step=st.integers(0, 2**40),
    rows=st.integers(1, 5),
    ranks=st.integers(1, 8),
    sequence=st.integers(1, 9),
    extra=st.integers(0, 50),
)
def test_any_number_of_ranks_reads_the_same_batch(seed, step, rows, ranks, sequence, extra):
    tokens = np.arange(sequence + 1 + extra, dtype=np.uint8)
    sizes = {"seed": seed, "step": step, "sequence": sequence}
    whole = batch_of_rank(tokens, **sizes, batch=rows * ranks, rank=0)
    parts = [batch_of_rank(tokens, **sizes, batch=rows, rank=rank) for rank in range(ranks)]
    for which in (0, 1):
        assert torch.equal(torch.cat([part[which] for part in parts]), whole[which])
