"""A measured step beside the predicted one: terms of a trace by hand, and what the command says."""

import gzip
import json

import pytest

from lancet_kernels.__main__ import main
from lancet_kernels.errors import UserError
from lancet_kernels.predict.measured import kernel_term, trace_terms
from tests.lancet_kernels.predict.small_models import QWEN3, written


def trace(path, kernels):
    """Args: kernels: (name, start, end) in microseconds."""
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin}
        for name, begin, end in kernels
    ]
    text = json.dumps(
        {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}, *events]}
    )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "attention"),
        ("merge_16x16_to_64x64_inverse_kernel", "attention"),
        ("_chunk_scan_fwd_kernel", "attention"),
        ("_state_passing_bwd_kernel", "attention"),
        ("void at::native::chunk_cat_cuda_kernel<float>", "element-wise"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_all"),
        ("void deep_ep::intranode::dispatch<8, 768>(...)", "all_to_all"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("void multi_tensor_apply_kernel<AdamFunctor<float>>", "optimizer"),
        ("triton_poi_fused_silu_mul_3", "element-wise"),
    ],
)
def test_kernels_by_their_names(name, term):
    assert kernel_term(name) == term


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_what_is_hidden_does_not_count(tmp_path, name):
    kernels = [
        ("nvjet_a", 0, 4000), ("ncclDevKernel_SendRecv", 3000, 6000), ("nvjet_b", 5000, 7000),
        ("add", 9000, 10000),
    ]  # fmt: skip
    terms = trace_terms(trace(tmp_path / name, kernels), 10.0)
    assert terms == pytest.approx({"products": 6.0, "all_to_all": 1.0, "element-wise": 1.0, "host": 2.0})
    # Two steps of 5 ms.
    assert trace_terms(tmp_path / name, 5.0)["products"] == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("text", ["{}", "[1]", '{"traceEvents": "none"}', '[{"ph": "X", "cat": "kernel"}]'])
def test_a_file_without_kernels_is_one_line(tmp_path, name, text):
    file = tmp_path / name
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    with pytest.raises(UserError, match=r"--kineto: got .*trace\.json"):
        trace_terms(file, 1.0)


@pytest.mark.parametrize("length", [3, 60, -9])
def test_a_trace_that_was_cut_short_is_one_line(tmp_path, length):
    file = trace(tmp_path / "trace.json.gz", [("nvjet", 0, 9000)])
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UserError, match=r"--kineto: got .*trace\.json\.gz"):
        trace_terms(file, 1.0)


def test_command_splits_the_difference(tmp_path, capsys):
    pytest.importorskip("transformers")
    hf = written(tmp_path, QWEN3, num_hidden_layers=1)
    kernels = [("nvjet", 0, 9000), ("ncclDevKernel_SendRecv", 9000, 10000)]
    arguments = ["plan", "--hf", hf, "--gpus", "8", "--sequence", "64"]
    more = ["--measured", "10ms", "--kineto", str(trace(tmp_path / "trace.json", kernels))]
    assert main([*arguments, *more, "--strategy", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    none = found["strategies"]["none"]
    assert sum(none["busy_ms"].values()) == pytest.approx(none["compute_ms"])
    assert none["binds"] in ("host", *none["busy_ms"], *none["exposed_ms"])
    first, *_ = found["measured"]["terms"]
    assert (first["term"], first["measured_ms"]) == ("products", 9.0)
    assert first["likely_ms"] == pytest.approx(9 - first["predicted_ms"])
    assert main([*arguments, *more[:2], "--strategy", "none", "--json"]) == 0
    terms = json.loads(capsys.readouterr().out)["measured"]["terms"]
    assert sum(term["likely_ms"] for term in terms) == pytest.approx(10 - none["step_ms"])
    # So little work for a GPU waits for the host.
    assert terms[0]["term"] == "host"
    # One microbatch has nothing to run beside: no other strategy is taken in silence.
    assert main([*arguments, "--strategy", "microbatches", "--trace", str(tmp_path / "trace.json")]) == 1
    assert "got microbatches, expected one that is possible here; one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measured", "24.7"], "--measured: got 24.7, expected a time above 0"),
        (["--measured", "1.2.3s"], "--measured: got 1.2.3s, expected a time above 0"),
        (["--measured", "0s", "--kineto", "trace.json"], "--measured: got 0s, expected a time above 0"),
        (["--kineto", "trace.json"], "options: got --kineto without --measured, expected both"),
        (["--search-seconds", "5"], "options: got --search-seconds without --search, expected both"),
    ],
)
def test_what_does_not_say_a_time_is_one_line(options, message, capsys):
    assert main(["plan", "--hf", "config.json", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
