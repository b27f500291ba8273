"""Report, Chakra trace and search: figures equal the answer's, and nothing is loaded from elsewhere."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lancet_kernels.cli import main
from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Kind
from lancet_kernels.prediction.answer import answer
from lancet_kernels.prediction.chakra import COLLECTIVES, save_chakra
from lancet_kernels.prediction.question import Question, gib
from lancet_kernels.prediction.report import PUBLISHED, report
from lancet_kernels.prediction.search import Found, layouts, search
from tests.lancet_kernels.prediction.small_models import QWEN3, written

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    return Question(
        written(tmp_path_factory.mktemp("qwen3"), QWEN3), "dgx-h100", 8, 8, sequence=64, accumulate=4
    )


@pytest.fixture(scope="module")
def found(question) -> Found:
    """The best layouts of two GPUs."""
    return search(replace(question, gpus=2, expert_ranks=1, accumulate=1))


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


def test_report_loads_nothing_and_has_the_figures(question, found):
    result = answer(question)
    text = report(result, found)
    page = Page(text)
    assert not [
        tag for tag, attributes in page.tags if {"src", "href", "srcset", "data", "action"} & set(attributes)
    ]
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "img", "base")]
    code = re.sub(r"<script type=.*?</script>", "", text, flags=re.S)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp|import\(", code)
    data = json.loads(page.scripts["application/json"])
    assert data["answer"]["strategies"] == json.loads(json.dumps(result.to_json()["strategies"]))
    assert data["search"] == json.loads(json.dumps(found.to_json()))
    assert data["published"] == json.loads(PUBLISHED.read_text())["rows"]
    for name, chain in data["timelines"].items():
        ends = [start + ms for _, _, start, ms, _ in chain["events"]]
        assert max(ends) == pytest.approx(result.strategies[name].times.iteration_ms, rel=1e-3)
        assert {kind for *_, kind in chain["events"]} <= set(range(len(chain["kinds"])))


def test_a_name_cannot_end_the_data(question, monkeypatch, tmp_path):
    """What a page is asked for comes from files of others."""
    rows = [{"name": "</script><b>", "quantity": "gain", "predicted": None}]
    (tmp_path / "published.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr("lancet_kernels.prediction.report.PUBLISHED", tmp_path / "published.json")
    text = report(answer(question))
    assert len(re.findall("</script>", text)) == 2
    assert json.loads(Page(text).scripts["application/json"])["published"][0]["name"] == "</script><b>"


def test_chakra_trace_is_what_protobuf_reads(question, tmp_path):
    """Read with protobuf's own parser, from the fields of the published schema."""
    nodes = read_chakra(save_chakra(answer(question).strategies["lancet"], tmp_path / "step").read_bytes())
    simulated = answer(question).strategies["lancet"]
    program = simulated.step.program
    assert [node.id - 1 for node in nodes] == list(simulated.order.positions)
    for node in nodes:
        instruction = program.instructions[node.id - 1]
        assert node.name == instruction.name
        assert set(node.data_deps) == {j + 1 for j in program.dependencies[node.id - 1]}
        assert node.duration_micros == round(simulated.ms[node.id - 1] * 1e3)
        attributes = {one.name: one for one in node.attr}
        if instruction.kind is Kind.ALL_TO_ALL:
            assert node.type == 7
            assert attributes["comm_type"].int64_val == COLLECTIVES["all_to_all"] == 6
            assert attributes["comm_size"].int64_val == instruction.bytes
            assert attributes["pg_name"].string_val == "expert"
        elif instruction.kind is Kind.COMPUTE:
            assert node.type == 4
            assert attributes["num_ops"].int64_val == int(instruction.flops)


def read_chakra(data: bytes) -> list:
    """The nodes of a trace."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal.decoder import _DecodeVarint32

    kinds = {"uint64": 4, "int64": 3, "string": 9, "bool": 8, "message": 11, "enum": 13}
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="c", syntax="proto3")

    def message(name, *fields):
        one = file.message_type.add(name=name)
        for number, label, kind, own in fields:
            field = one.field.add(
                name=own, number=number, label=3 if label == "repeated" else 1, type=kinds[kind]
            )
            if kind == "message":
                field.type_name = ".c.AttributeProto"

    message(
        "AttributeProto", (1, "", "string", "name"), (9, "", "int64", "int64_val"),
        (13, "", "uint64", "uint64_val"), (27, "", "bool", "bool_val"), (29, "", "string", "string_val"),
    )  # fmt: skip
    message("GlobalMetadata", (1, "", "string", "version"))
    message(
        "Node", (1, "", "uint64", "id"), (2, "", "string", "name"), (3, "", "uint64", "type"),
        (4, "repeated", "uint64", "ctrl_deps"), (5, "repeated", "uint64", "data_deps"),
        (6, "", "uint64", "start_time_micros"), (7, "", "uint64", "duration_micros"),
        (10, "repeated", "message", "attr"),
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"c.{name}"))
        for name in ("GlobalMetadata", "Node")
    ]
    found, at = [], 0
    while at < len(data):
        size, at = _DecodeVarint32(data, at)
        found.append(classes[bool(found)].FromString(data[at : at + size]))
        at += size
    assert found[0].version
    return found[1:]


def test_the_search_finds_what_all_layouts_give(question, found):
    """Against every layout simulated."""
    asked = replace(question, gpus=2, expert_ranks=1, accumulate=1)
    every = {layout: answer(layout) for layout in layouts(asked)}
    times = sorted(one.strategies[one.best].step_ms for one in every.values())
    assert [one.step_ms for one in found.best] == pytest.approx(times[: len(found.best)])
    assert len(found.best) + len(found.others) == len(every)
    assert all(one.why for one in found.others)
    assert not any(one.why for one in found.best)


@pytest.mark.long
def test_nothing_fits(tmp_path):
    asked = Question(written(tmp_path, QWEN3, vocab_size=40_000_000, num_hidden_layers=1), "dgx-v100", 1, 1)
    with pytest.raises(UserError, match=r"layouts: got more than \d+ GiB per GPU"):
        search(replace(asked, sequence=64))


def test_a_search_without_time_says_so(question):
    """In no time, nothing is simulated."""
    asked = replace(question, gpus=2, expert_ranks=1, accumulate=1)
    with pytest.raises(UserError, match="--search-seconds"):
        search(asked, 0.0)


def test_what_a_bound_promises(found):
    for layout in found.best:
        assert layout.bound_ms <= layout.step_ms
        assert layout.peak_memory_gib <= gib(80e9)


def test_command_writes_report_trace_and_chakra(question, tmp_path, capsys):
    arguments = ["plan", "--hf", question.hf, "--cluster", "dgx-h100", "--gpus", "8", "--sequence", "64"]
    outputs = {flag: str(tmp_path / name) for flag, name in (("report", "p.html"), ("trace", "t.json"))}
    written_to = [word for flag, path in outputs.items() for word in (f"--{flag}", path)]
    assert (
        main([*arguments, "--accumulate", "2", *written_to, "--chakra", str(tmp_path / "c"), "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    data = json.loads(Page((tmp_path / "p.html").read_text()).scripts["application/json"])
    assert data["answer"]["strategies"]["none"]["step_ms"] == printed["strategies"]["none"]["step_ms"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "c.0.et").stat().st_size > 1000
