import sys
import sysconfig

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lancet_kernels.training.data as data
from lancet_kernels.errors import UserError
from lancet_kernels.training.data import check_length, load_corpus, training_batch, validation_batches
from tests.examples import examples

WORD = 2**64 - 1


def splitmix64(state: int) -> int:
    """The published generator (public domain, S. Vigna), in Python's integers."""
    z = (state + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def text_of(tokens):
    return bytes(tokens.tolist()).decode()


def write_files(folder, texts):
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_single_file_gives_its_last_twentieth_to_validation(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("0123456789" * 10)
    corpus = load_corpus(str(file))
    assert (corpus.name, corpus.vocab_size, corpus.train.dtype) == (str(file), 256, np.uint8)
    assert text_of(corpus.train) == "0123456789" * 9 + "01234"
    assert text_of(corpus.validation) == "56789"


def test_small_folder_gives_its_last_file_to_validation(tmp_path):
    write_files(
        tmp_path,
        {
            "b.txt": "bee",
            "a.txt": "ay",
            "sub/z.txt": "zed",
            "sub/c.bin": b"\0binary",
            ".git/x": "hidden",
            "empty": "",
        },
    )
    corpus = load_corpus(str(tmp_path))
    assert text_of(corpus.train) == "ay\nbee"
    assert text_of(corpus.validation) == "zed"


def test_folder_with_one_text_is_split_like_a_file(tmp_path):
    write_files(tmp_path, {"a.txt": "x" * 39 + "yz", "b.bin": b"\0"})
    corpus = load_corpus(str(tmp_path))
    assert text_of(corpus.validation) == "yz"
    assert text_of(corpus.train) == "x" * 39


def test_every_twentieth_file_goes_to_validation(tmp_path):
    write_files(tmp_path, {f"{index:02d}.txt": f"<{index:02d}>" for index in range(1, 46)})
    corpus = load_corpus(str(tmp_path))
    assert text_of(corpus.validation) == "<20>\n<40>"
    train = text_of(corpus.train).split("\n")
    assert train == [f"<{index:02d}>" for index in range(1, 46) if index not in (20, 40)]


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


def word_tokenizer(path, words):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel(words, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "isolated")
    # Would add a token to every text if special tokens were not switched off.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    tokenizer.save(str(path))


def test_tokenizer_encodes_file_by_file(tmp_path):
    word_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "[BOS]": 1, "\n": 2, "red": 3, "green": 299})
    write_files(tmp_path / "texts", {"1": "red", "2": "green\nblue", "3": "green"})
    corpus = load_corpus(str(tmp_path / "texts"), str(tmp_path / "tokenizer.json"))
    assert (corpus.vocab_size, corpus.train.dtype) == (300, np.uint16)
    assert corpus.train.tolist() == [3, 2, 299, 2, 0]
    assert corpus.validation.tolist() == [299]


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.uint32)],
)
def test_tokens_take_the_smallest_type(tmp_path, largest, dtype):
    word_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "[BOS]": 1, "big": largest})
    (tmp_path / "text").write_text("big")
    corpus = load_corpus(str(tmp_path / "text"), str(tmp_path / "tokenizer.json"))
    assert (corpus.train.dtype, corpus.train.tolist()) == (dtype, [largest])


def test_long_texts_are_encoded_in_pieces_that_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ENCODED_AT_ONCE", 7)
    text = "ab\ncdefghijklmno\n\npq\nr"
    pieces = list(data._pieces(text))
    assert pieces == ["ab\n", "cdefghi", "jklmno\n", "\npq\nr"]


def test_missing_tokenizers_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'lancet-kernels\[tokenizers\]'"):
        load_corpus(None, "tokenizer.json")


def test_bad_inputs_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "bad.json").write_text("{\n}")
    for path, tokenizer, message in [
        ("missing", None, "missing, which does not exist"),
        ("empty", None, "empty, which has no text"),
        ("binary", None, "binary, which has no text"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            load_corpus(str(tmp_path / path), tokenizer)
        assert "\n" not in str(caught.value)
    for tokenizer in ("bad.json", "missing.json"):
        pytest.importorskip("tokenizers")
        with pytest.raises(
            UserError, match=r"tokenizer: got .*json \(.*\), expected a tokenizer.json"
        ) as caught:
            load_corpus(None, str(tmp_path / tokenizer))
        assert "\n" not in str(caught.value)


def test_hash_has_the_published_values():
    # The first outputs of splitmix64 seeded with 0 and with 1234567.
    assert data._mix(np.array([0, 1234567], dtype=np.uint64)).tolist() == [
        0xE220A8397B1DCDAF,
        6457827717110365317,
    ]


def test_training_rows_start_where_the_hash_says():
    tokens = np.arange(1000, dtype=np.uint16)
    inputs, targets = training_batch(tokens, seed=-1, step=7, global_batch=6, sequence=4, rank=1, ranks=2)
    starts = [splitmix64(splitmix64(splitmix64(WORD) ^ 7) ^ row) % 996 for row in (3, 4, 5)]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[start + place for place in range(4)] for start in starts]
    assert torch.equal(targets, inputs + 1)


def test_every_start_is_reached_and_none_beyond():
    tokens = np.arange(7, dtype=np.uint8)
    inputs, targets = training_batch(tokens, seed=0, step=0, global_batch=400, sequence=4, rank=0, ranks=1)
    assert torch.bincount(inputs[:, 0]).gt(100).tolist() == [True, True, True]
    assert targets.max() == 6


def test_seed_and_step_both_change_the_data():
    tokens = np.arange(60000, dtype=np.uint16)
    batches = {
        tuple(
            training_batch(tokens, seed=seed, step=step, global_batch=4, sequence=1, rank=0, ranks=1)[0]
            .flatten()
            .tolist()
        )
        for seed in range(4)
        for step in range(4)
    }
    assert len(batches) == 16


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
    sizes = {"seed": seed, "step": step, "global_batch": rows * ranks, "sequence": sequence}
    whole = training_batch(tokens, **sizes, rank=0, ranks=1)
    parts = [training_batch(tokens, **sizes, rank=rank, ranks=ranks) for rank in range(ranks)]
    for which in (0, 1):
        assert torch.equal(torch.cat([part[which] for part in parts]), whole[which])


def test_validation_windows_by_hand():
    # 21 tokens hold five windows of 4: at 0, 4, 8, 12, 16. Two batches of two take every 5/4-th.
    tokens = np.arange(21, dtype=np.uint8)
    batches = list(
        validation_batches(tokens, global_batch=2, sequence=4, rank=0, ranks=1, max_batches=2),
    )
    assert [inputs[:, 0].tolist() for inputs, _ in batches] == [[0, 4], [8, 12]]
    assert batches[1][1].tolist() == [[9, 10, 11, 12], [13, 14, 15, 16]]
    # Only two batches of two fit however many are asked for.
    assert (
        len(list(validation_batches(tokens, global_batch=2, sequence=4, rank=0, ranks=1, max_batches=9))) == 2
    )


def test_validation_windows_overlap_rather_than_be_none():
    tokens = np.arange(8, dtype=np.uint8)
    [(inputs, targets)] = validation_batches(
        tokens, global_batch=3, sequence=5, rank=0, ranks=1, max_batches=4
    )
    assert inputs[:, 0].tolist() == [0, 1, 2]
    assert targets[:, -1].tolist() == [5, 6, 7]


@examples(100)
@given(
    rows=st.integers(1, 3),
    ranks=st.integers(1, 4),
    sequence=st.integers(1, 6),
    extra=st.integers(0, 150),
    max_batches=st.integers(1, 5),
)
def test_validation_is_the_same_at_any_number_of_ranks(rows, ranks, sequence, extra, max_batches):
    tokens = np.arange(sequence + 1 + extra, dtype=np.uint8)
    sizes = {"global_batch": rows * ranks, "sequence": sequence, "max_batches": max_batches}
    whole = list(validation_batches(tokens, **sizes, rank=0, ranks=1))
    parts = [list(validation_batches(tokens, **sizes, rank=rank, ranks=ranks)) for rank in range(ranks)]
    fits = (len(tokens) - 1) // (sequence * rows * ranks)
    assert [len(part) for part in parts] == [len(whole)] * ranks == [max(min(fits, max_batches), 1)] * ranks
    for batch, (inputs, targets) in enumerate(whole):
        assert torch.equal(torch.cat([part[batch][0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[batch][1] for part in parts]), targets)
        assert torch.equal(inputs + 1, targets)
    if fits:
        predicted = torch.cat([targets.flatten() for _, targets in whole])
        assert len(predicted.unique()) == len(predicted)


def test_sizes_that_do_not_fit():
    tokens = np.zeros(5, dtype=np.uint8)
    sizes = {"global_batch": 4, "sequence": 4, "rank": 0, "ranks": 2}
    training_batch(tokens, seed=0, step=0, **sizes)
    for change, message in [
        ({"sequence": 5}, "training data: got 5 tokens, expected at least 6 for sequences of 5; give more"),
        ({"sequence": 0}, "sequence length: got 0"),
        (
            {"global_batch": 3},
            "global batch: got 3 sequences for 2 ranks, expected a positive multiple of 2; choose 4",
        ),
        ({"global_batch": 0}, "global batch: got 0 .* choose 2"),
    ]:
        with pytest.raises(UserError, match=message):
            training_batch(tokens, seed=0, step=0, **(sizes | change))
        with pytest.raises(UserError, match=message.replace("training", "validation")):
            validation_batches(tokens, max_batches=1, **(sizes | change))
    with pytest.raises(UserError, match="validation batches: got 0"):
        validation_batches(tokens, max_batches=0, **sizes)
    with pytest.raises(UserError, match="test data"):
        check_length(tokens, 5, "test")
