"""A made-up trace in the format of PyTorch's profiler: the kernels of each stage, and their times."""

import json

import pytest

from bench.published import trace
from bench.published.trace import read_trace, replayed, summary
from lancet_kernels.errors import UserError

STAGES = (("attn(F)", 3.0), ("dispatch(F)", 2.0), ("mlp(B)", 4.0), ("mlp(F)", 1.0), ("combine(F)", 2.0))


def written(tmp_path, stages):
    """One kernel in two launches for each stage; messages on a stream of their own, all kernels much later
    than their launches."""
    events = [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 500}]
    at = {7: 1000.0, 27: 1000.0}
    for n, (name, ms) in enumerate(stages):
        stream = 27 if name.startswith(("dispatch", "combine")) else 7
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": 10 * n, "dur": 9})
        for part in range(2):
            ids = {"correlation": 2 * n + part}
            events.append(
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 10 * n + 1 + part,
                 "dur": 1, "args": ids}
            )  # fmt: skip
            events.append(
                {"ph": "X", "cat": "kernel", "name": "k", "ts": at[stream], "dur": ms * 500, "tid": stream,
                 "args": ids}
            )  # fmt: skip
            at[stream] += ms * 500
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_stages_and_their_times(tmp_path):
    read = read_trace(written(tmp_path, STAGES))
    assert [(f"{s.name}({s.phase})", s.ms) for s in read.stages] == [
        (name, pytest.approx(ms)) for name, ms in STAGES
    ]
    assert read.ms == pytest.approx(8.0)


def test_the_clock_hides_a_dispatch_beside_the_backward(tmp_path):
    """attn 0-3, dispatch 3-5 beside mlp(B) 3-7, mlp(F) 7-8, combine 8-10."""
    read = read_trace(written(tmp_path, STAGES))
    times = replayed(read.stages)
    assert times.start == pytest.approx(dict(enumerate([0, 3, 3, 7, 8])))
    figures = summary(read)
    assert figures["replayed_ms"] == pytest.approx(10)
    assert figures["without_overlap_ms"] == pytest.approx(12)
    assert figures["hidden"] == pytest.approx(0.5)


def test_weight_gradients_wait_for_their_own_backward(tmp_path):
    stages = (("combine(B)", 2.0), ("mlp(B)", 1.0), ("dispatch(B)", 5.0), ("mlp(W)", 1.0), ("attn(B)", 1.0))
    times = replayed(read_trace(written(tmp_path, stages)).stages)
    assert times.start == pytest.approx(dict(enumerate([0, 2, 3, 3, 8])))


def test_a_file_that_is_no_trace_is_one_line(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"traceEvents": []}')
    for wrong in (path, tmp_path / "missing.json"):
        with pytest.raises(UserError, match="trace"):
            read_trace(wrong)


def test_it_prints_the_summary_and_the_stages(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["trace", str(written(tmp_path, STAGES))])
    trace.main()
    said = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert float(said["replayed_ms"]) == pytest.approx(10)
    assert said["dispatch(F)"].startswith("2.000 ms, 1 times")
