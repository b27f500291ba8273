"""Report and search: figures equal the answer's, and nothing is loaded from elsewhere."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lancet_kernels.__main__ import main
from lancet_kernels.errors import UserError
from lancet_kernels.predict.answer import STRATEGIES, answer
from lancet_kernels.predict.question import Question, gib
from lancet_kernels.predict.report import PUBLISHED, report
from lancet_kernels.predict.search import SearchResult, _by_formula, layouts, search, states_gib
from tests.lancet_kernels.predict.small_models import DENSE, QWEN3, written

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    return Question(
        written(tmp_path_factory.mktemp("qwen3"), QWEN3, num_hidden_layers=1), "dgx-h100", 8, 8, sequence=64,
        accumulate=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """One layer on two GPUs."""
    hf = written(tmp_path_factory.mktemp("dense"), DENSE, num_hidden_layers=1)
    return Question(hf, "dgx-h100", 2, 1, sequence=64)


@pytest.fixture(scope="module")
def searched(dense) -> SearchResult:
    """The best layouts with FSDP, without tensor parallelism."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lancet_kernels.predict.search.SHARDING", ("full",))
        patch.setattr("lancet_kernels.predict.search.TENSOR_RANKS", (1,))
        return search(dense)


class Page(HTMLParser):
    """Collects tags with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag == "script":
            kind = attributes.get("type", "code")
            self.scripts[kind] = self.scripts.get(kind, "") + data


def test_report_loads_nothing_and_has_the_figures(question, searched):
    result = answer(question)
    text = report(result, searched)
    page = Page(text)
    assert not [
        tag for tag, attributes in page.tags if {"src", "href", "srcset", "data", "action"} & set(attributes)
    ]
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "img", "base")]
    code = re.sub(r"<script type=.*?</script>", "", text, flags=re.S)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp|import\(", code)
    data = json.loads(page.scripts["application/json"])
    assert data["answer"]["strategies"] == json.loads(json.dumps(result.to_json()["strategies"]))
    assert data["search"] == json.loads(json.dumps(searched.to_json()))
    assert data["published"] == json.loads(PUBLISHED.read_text())["rows"]
    for name, chain in data["timelines"].items():
        ends = [start + ms for _, _, start, ms, _ in chain["events"]]
        assert max(ends) == pytest.approx(result.strategies[name].times.iteration_ms, rel=1e-3)
        assert {kind for *_, kind in chain["events"]} <= set(range(len(chain["kinds"])))


def test_a_name_cannot_end_the_data(question, monkeypatch, tmp_path):
    """What a page is asked for comes from files of others."""
    name = "</script><!--<script>"
    rows = [{"name": name, "quantity": "gain", "predicted": None}]
    (tmp_path / "published.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr("lancet_kernels.predict.report.PUBLISHED", tmp_path / "published.json")
    text = report(answer(question))
    assert len(re.findall("<script|<!--|</script>", text)) == 4
    assert json.loads(Page(text).scripts["application/json"])["published"][0]["name"] == name


@pytest.mark.long
def test_the_search_finds_what_all_layouts_give(dense):
    """Against every layout simulated."""
    searched = search(dense)
    every = {layout: answer(layout) for layout in layouts(dense)}
    times = sorted(one.strategies[one.best].step_ms for one in every.values())
    assert [one.step_ms for one in searched.best] == pytest.approx(times[: len(searched.best)])
    assert len(searched.best) + len(searched.others) == len(every)
    assert all(one.why for one in searched.others)
    assert not any(one.why for one in searched.best)


@pytest.mark.parametrize(("sequence", "tensor_ranks", "microbatch"), [(7, 1, 2), (64, 2, 1), (64, 2, 3)])
def test_layouts_are_of_whole_sequences_and_of_as_many_tokens(dense, sequence, tensor_ranks, microbatch):
    """Not of a slice of a token, nor of half a sequence."""
    asked = replace(dense, gpus=8, sequence=sequence, tensor_ranks=tensor_ranks, microbatch=microbatch)
    found = list(layouts(asked))
    assert {one.tokens for one in found} == {asked.tokens}
    assert asked.tensor_ranks in {one.tensor_ranks for one in found}
    assert all(map(_by_formula, found))


def test_a_layout_that_cannot_be_sharded_is_left_out(tmp_path, monkeypatch):
    """Experts over 8 of 24 GPUs are held three times, which their widths are no multiple of."""
    hf = written(tmp_path, QWEN3, num_hidden_layers=1)
    asked = Question(hf, "dgx-h100", 24, 8, sequence=64)
    monkeypatch.setattr(
        "lancet_kernels.predict.search.layouts", lambda _: [asked, replace(asked, sharding="none")]
    )
    searched = search(asked)
    assert [one.question.sharding for one in searched.best] == ["none"]
    assert "experts to shard" in searched.others[0].why
    monkeypatch.setattr("lancet_kernels.predict.search.layouts", lambda _: [asked])
    with pytest.raises(UserError, match="layouts: got none that is possible, expected one; experts to shard"):
        search(asked)


@pytest.mark.long
def test_nothing_fits(tmp_path):
    asked = Question(written(tmp_path, QWEN3, vocab_size=40_000_000, num_hidden_layers=1), "dgx-v100", 1, 1)
    with pytest.raises(UserError, match=r"layouts: got at least [\d.]+ GiB per GPU"):
        search(replace(asked, sequence=64))


def test_a_search_without_time_says_so(dense):
    """In no time, nothing is simulated."""
    with pytest.raises(UserError, match="--search-seconds"):
        search(dense, 0.0)


def test_what_a_bound_promises(searched):
    for layout in searched.best:
        assert layout.bound_ms <= layout.step_ms
        assert layout.least_gib <= layout.peak_memory_gib <= gib(80e9)


def test_command_writes_report_and_trace_and_prints_one_object(question, tmp_path, capsys):
    arguments = ["plan", "--hf", question.hf, "--cluster", "dgx-h100", "--gpus", "8", "--sequence", "64"]
    outputs = {flag: str(tmp_path / name) for flag, name in (("report", "p.html"), ("trace", "t.json"))}
    written_to = [word for flag, path in outputs.items() for word in (f"--{flag}", path)]
    assert main([*arguments, "--accumulate", "2", *written_to, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    data = json.loads(Page((tmp_path / "p.html").read_text()).scripts["application/json"])
    assert data["answer"]["strategies"]["none"]["step_ms"] == printed["strategies"]["none"]["step_ms"]
    assert {*printed["strategies"], *printed["impossible"]} == {*STRATEGIES, "auto"}
    for figures in printed["strategies"].values():
        assert {
            "step_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_gib", "exposed_ms",
            "lower_bound_ms",
        } <= set(figures)  # fmt: skip
    assert printed["assumed"]
    assert printed["experts_over"] == 8
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.long
def test_formulas_bound_what_is_simulated(question):
    """By policy, and with experts, tensors and states over other ranks; memory is bounded closely."""
    for more in (
        *({"recompute": policy} for policy in ("none", "attention", "experts", "full")),
        {"expert_ranks": 2, "sharding": "full", "recompute": "full"},
        {"tensor_ranks": 2, "microbatch": 2, "sharding": "none"},
    ):
        layout = _by_formula(replace(question, sequence=512, **more))
        none = answer(layout.question, ["none"]).strategies["none"]
        assert 0 < layout.bound_ms <= none.step_ms
        assert 0.3 * none.peak_memory_gib < layout.least_gib <= none.peak_memory_gib


def test_states_are_those_of_the_capture(question):
    for sharding in ("none", "optimizer", "full"):
        asked = replace(question, sharding=sharding)
        memory = answer(asked, ["none"]).strategies["none"].memory
        kept = memory["gradients"] + memory["optimizer"] + memory["parameters"]
        assert states_gib(asked) == pytest.approx(kept, rel=0.02)
