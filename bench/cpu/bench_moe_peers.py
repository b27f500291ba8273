"""The MoE layer, forward and backward, beside what a user would have instead, in turns: one round each.

    ours, dropless; ours, capacity 1.25     `MoELayer`
    transformers grouped_mm, eager          its Mixtral block, with the same weights; checked equal first
    dense                                   a SwiGLU layer of the same FLOPs: what no MoE layer gets below

`extra_info` has the medians of all, ours over each of them, and the most memory that a process of its own
took over what it held before the pass (resident, MiB). Of a dropless layer with biases none, autograd must
keep, of rows, S (2 D + H + F) numbers: rows of x and of the experts' results, and what goes into the
activation and comes out; S = T K, H = 2 F for SwiGLU.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from bench.peers import SAME_WEIGHTS, Absent, same_weights
from lancet_kernels.measure.workloads import Workload

WORKLOADS = {
    w.name: w
    for w in (
        Workload("few experts", 2048, 512, 1024, 8, 2, "swiglu"),
        Workload("many experts", 2048, 512, 256, 64, 8, "swiglu"),
    )
}
LONG = Workload("many rows", 16384, 512, 256, 64, 8, "swiglu")
ROUNDS, WARMUP = 7, 1


def one_pass(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x).backward(dy)

    return run


def kept_bytes(w: Workload, dtype: torch.dtype) -> int:
    """What autograd must keep of rows."""
    return w.tokens * w.choices * (2 * w.width + w.wide + w.hidden) * dtype.itemsize


def _peak_in_process(name: str, w: Workload, threads: int) -> int:
    torch.set_num_threads(threads)
    layer = same_weights(w, torch.float32, torch.device("cpu"), [name])[name]
    x = torch.randn(w.tokens, w.width, requires_grad=True)
    dy = torch.randn_like(x)
    small = torch.randn(8, w.width, requires_grad=True)
    one_pass(layer, small, torch.randn_like(small))()  # libraries load
    layer.zero_grad(set_to_none=True)
    before = _status_kib("VmRSS")
    # Linux resets the high-water mark of a process on request.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    one_pass(layer, x, dy)()
    return (_status_kib("VmHWM") - before) * 1024


def _status_kib(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


def peak_bytes(name: str, w: Workload) -> int:
    """Resident bytes that one pass takes at its worst moment, in a process of its own, gradients included."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_in_process, name, w, torch.get_num_threads()).result(timeout=600)


@pytest.mark.parametrize("name", WORKLOADS)
def bench_moe_peers(benchmark, device, dtype, name: str) -> None:
    w = WORKLOADS[name] if benchmark.enabled else WORKLOADS[name].small()
    try:
        layers = same_weights(w, dtype, device)
    except Absent as error:
        pytest.skip(str(error))
    x = torch.randn(w.tokens, w.width, dtype=dtype, device=device, requires_grad=True)
    runs = {peer: one_pass(layer, x, torch.randn_like(x)) for peer, layer in layers.items()}
    seconds: dict[str, list[float]] = {peer: [] for peer in runs}
    ours = "ours, dropless"

    def timed(peer: str) -> None:
        begin = time.perf_counter()
        runs[peer]()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[peer].append(time.perf_counter() - begin)

    def the_others() -> None:
        for peer in runs:
            if peer != ours:
                timed(peer)

    benchmark.group = f"MoE layer beside its peers {w.name}"
    benchmark.pedantic(lambda: timed(ours), setup=the_others, rounds=ROUNDS, warmup_rounds=WARMUP)
    warmup = WARMUP if benchmark.enabled else 0
    median = {peer: statistics.median(times[warmup:]) * 1e3 for peer, times in seconds.items()}
    info = {
        "kernel": "MoE layer beside its peers",
        "contender": ours,
        "ours": True,
        "workload": str(w),
        "device": f"{device.type}, {torch.get_num_threads()} threads",
        "median_ms": median,
        "ours_over": {peer: median[ours] / ms for peer, ms in median.items() if peer != ours},
    }
    if device.type == "cpu":
        peaks = {peer: peak_bytes(peer, w) for peer in (SAME_WEIGHTS if benchmark.enabled else [ours])}
        info |= {"peak_mib": {peer: peak / 2**20 for peer, peak in peaks.items()}}
        info |= {"kept_mib": kept_bytes(w, dtype) / 2**20}
    benchmark.extra_info.update(info)


def bench_memory_of_many_rows(benchmark, device, dtype) -> None:
    """Peak memory over what autograd must keep of rows; goal: under 2."""
    if device.type != "cpu":
        pytest.skip("resident memory is measured on a CPU")
    w = LONG if benchmark.enabled else LONG.small()
    peak = benchmark.pedantic(peak_bytes, args=("ours, dropless", w), rounds=1)
    kept = kept_bytes(w, torch.float32)
    benchmark.group = "MoE layer, memory"
    benchmark.extra_info.update(
        kernel="MoE layer, memory", contender="ours, dropless", ours=True, workload=str(w), device="cpu",
        peak_mib={"ours, dropless": peak / 2**20}, kept_mib=kept / 2**20, peak_over_kept=peak / kept,
    )  # fmt: skip
