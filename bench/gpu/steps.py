"""The steps of `first_run`. Each yields results as they come; on a CPU it is small, and interpreted.

python -m bench.gpu.steps eta cuda
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from bench.gpu.first_run import FACT
from bench.peers import by_torch
from lancet_kernels import GraphedStep, optimize
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import overlap
from lancet_kernels.kernels.config import default_overlap_config
from lancet_kernels.kernels.hopper import kernel as hopper_kernel
from lancet_kernels.kernels.overlap import variants, warm_up, warming_up
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.protocol.schedule import NUM_PUTS, NUM_TILES
from lancet_kernels.layer.gpt2_moe import GPT2MoE, TrainingStep, model_config
from lancet_kernels.measure.fused_pass import WORKLOADS, FusedPasses, Workload, most_rows
from lancet_kernels.ops.comm.cuda_transfer import sleep_on_stream
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.timing import Clock

Results = Iterator[dict]
# Allowed errors of a tensor relative to its norm, and of its worst element relative to the root mean square.
# Rounding to bfloat16 gives 0.005 and 0.04 in one computation, a missing row 3 in the worst element.
ALLOWED = {torch.bfloat16: (1.5e-2, 0.25), torch.float32: (1e-4, 1e-3)}
MIDDLE = Workload("middle", 8192, 2048, 1024, 16, 4, "swiglu")
SPEEDS = {
    "speed_sonic": WORKLOADS["wide"],
    "speed_mixtral": Workload("mixtral", 4096, 4096, 14336, 8, 2, "swiglu"),
    "speed_qwen3": Workload("qwen3-30b", 16384, 2048, 768, 128, 8, "swiglu"),
    # 32 of its 256 experts, with the rows that 8 ranks of 8,192 tokens send to one of them.
    "speed_deepseek": Workload("deepseek-v3", 16384, 7168, 2048, 32, 4, "swiglu"),
}
KERNELS = "lancet_kernels/kernels/"
PES = KERNELS + "test_virtual_pes.py"
# Kernels and ops one by one, and NVSHMEM where it is installed; layers and steps of the library.
OPS = ("ops/moe", "graph/costs", KERNELS + "symmetric", KERNELS + "protocol", KERNELS + "test_row_kernels.py")
LAYERS = ("lancet_kernels/layer", "lancet_kernels/optimization")
# By step: files and folders of tests, their -k expressions on a GPU and on a CPU, and parallel processes.
# Virtual PEs wait for one another, and must not share the GPU with other processes.
TESTS = {
    "virtual_pes": ((PES,), "is_as and (gelu] or swiglu]) or passes and 2- or never", "without_tasks", 1),
    "virtual_pes_more": ((PES,), "is_as or passes or graph or warm_up", "forward_and_backward", 1),
    "ops": (OPS, "", "by_hand", 6),
    "layers": (LAYERS, "", "by_hand", 6),
    "sanitizer": ((KERNELS + "test_sanitizer_gpu.py",), "memcheck", "memcheck", 1),
}


class Layer:
    """A layer's experts and rows, and the configuration of its passes, whose kernels are compiled."""

    def __init__(self, workload: Workload, device: torch.device, programs: int | None = None) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.workload = w = workload if self.on_gpu else workload.small()
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.passes = p = FusedPasses(w, self.dtype, device)
        config = default_overlap_config(w.width, w.hidden, w.activation, self.dtype, device)
        self.config = replace(config, programs=programs or config.programs)
        warm_up(*p.exchanges(self.config), p.x, p.routing, p.experts, self.config)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def compare(self) -> dict:
        """Compare forward and backward with torch's ops and autograd."""
        begin = time.monotonic()
        y, saved = self.passes.begin(self.config)
        self.synchronize()
        print("the forward came back", flush=True)
        gradients = self.passes.backward(self.config, saved)
        self.synchronize()
        seconds = time.monotonic() - begin
        for exchange in self.passes.exchanges(self.config):
            exchange.check()
        own = {"y": y} | {name: getattr(gradients, name) for name in ("dx", "dweight", "dw1", "dw2")}
        expected = by_torch(self.passes.x, self.passes.dy, self.passes.routing, self.passes.experts)
        distances = agreement(own, dict(zip(own, expected, strict=True)), self.dtype)
        about = {"sizes": str(self.workload), "bodies": self.config.bodies, "programs": self.config.programs}
        return {**about, "seconds": seconds, **distances}


def agreement(own: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> dict:
    """Errors of tensors computed in `dtype`, by name: norm and worst element. NaN is never right.

    Rounding of an element and of one factor of it does not count: the gradient of one token, a product of two
    vectors, has elements of 200 times its root mean square.
    """
    off = {}
    for name, tensor in own.items():
        right = expected[name].float()
        error = (tensor.float() - right).nan_to_num(nan=math.inf)
        scale = max(right.norm().item(), 1e-30)
        beyond = error.abs() - 2 * torch.finfo(dtype).eps * right.abs()
        worst = beyond.max().clamp_min(0).item() if error.numel() else 0.0
        off[name] = error.norm().item() / scale, worst * right.numel() ** 0.5 / scale
    norm, worst = ALLOWED[dtype]
    return {"right": all(a < norm and b < worst for a, b in off.values()), "off": off}


def machine(device: torch.device) -> Results:
    """The ceilings: throughput of cuBLAS and of memory."""
    clock, (size, room) = Clock(device), (8192, 2**30) if device.type == "cuda" else (512, 2**24)
    x, y = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    a, b = (torch.empty(room, dtype=torch.uint8, device=device) for _ in range(2))
    times = clock.rounds({"matmul": lambda: x @ y, "copy": lambda: a.copy_(b)}, 15, 3)
    ms = {name: statistics.median(values) for name, values in times.items()}
    yield {"matmul": {"tflops": 2 * size**3 / ms["matmul"] * 1e-9}, "copy_gb_s": 2 * room / ms["copy"] * 1e-6}
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,memory.total"
        command = ["nvidia-smi", query, "--format=csv,noheader", "--id=0"]
        yield {"nvidia-smi": subprocess.run(command, capture_output=True, text=True, timeout=20).stdout}


def one_program(device: torch.device) -> Results:
    """The kernel with a single program, so that no race between programs can hang it."""
    yield Layer(Workload("tiny", 300, 256, 192, 4, 2, "swiglu"), device, programs=1).compare()


def all_programs(device: torch.device) -> Results:
    for activation in ("swiglu", "gelu"):
        yield {activation: Layer(replace(MIDDLE, activation=activation), device).compare()}


def speed(workload: Workload, device: torch.device) -> Results:
    """Forward and backward, beside the bare products of the same rows by torch's grouped_mm."""
    layer = Layer(workload, device)
    yield layer.compare()
    passes, config, w, experts = layer.passes, layer.config, layer.workload, layer.passes.experts
    rows = int(passes.routing.count.sum())
    a, h, p = (torch.randn(rows, n, device=device).to(layer.dtype) for n in (w.width, w.hidden, w.wide))
    mm = partial(torch.nn.functional.grouped_mm, offs=passes.routing.count.cumsum(0).int())
    saved: list = []
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: saved.append(passes.begin(config)[1]),
        "backward": lambda: passes.backward(config, saved.pop()),
        "grouped_mm forward": lambda: (mm(a, experts.w1), mm(h, experts.w2)),
        "grouped_mm backward": lambda: (mm(a, experts.w2.mT), mm(p, experts.w1.mT), mm(h.mT, a), mm(a.mT, p)),
    }
    rounds, warmup = (15, 3) if layer.on_gpu else (1, 0)
    for name, values in Clock(device).rounds(runs, rounds, warmup).items():
        ms = sorted(values)
        flops = 2.0 * rows * w.width * (w.wide + w.hidden) * (2 if "backward" in name else 1)
        figures = {"ms": ms[rounds // 2], "least_ms": ms[0], "most_ms": ms[-1]}
        yield {name: figures | {"tflops": flops / ms[rounds // 2] * 1e-9}}

    def both() -> None:
        runs["forward"]()
        runs["backward"]()

    begin = time.process_time()
    for _ in range(rounds):
        both()
    yield {"host_ms": (time.process_time() - begin) / rounds * 1e3}
    layer.synchronize()
    with torch.profiler.profile() as profile:
        both()
        layer.synchronize()
    kernels = {each.key[:60]: each.device_time_total for each in profile.key_averages()}
    yield {"kernels_us": {name: us for name, us in kernels.items() if us}}


def eta(device: torch.device) -> Results:
    """Overlap efficiency: max(puts, GEMMs) / both, at four speeds of puts.

    One PE. A narrow window of puts stands for a slow wire; its speed is measured in a launch without GEMMs.
    The backward has as many puts, which cannot run alone: its weight gradients wait for tiles.
    """
    layer = Layer(Workload("eta", 16384, 2048, 768, 64, 8, "swiglu"), device)
    # Rows and elements of a step of a put; steps in flight per program (0: the default).
    windows = {"full": (2, 1024, 0), "fast": (1, 1024, 3), "middle": (1, 1024, 2), "slow": (1, 512, 2)}
    slots, widest = hopper_kernel.put_slots, triton.next_power_of_2(layer.workload.width)
    configs = {
        name: replace(layer.config, put_rows=rows, put_block=min(elements, widest))
        for name, (rows, elements, _) in windows.items()
    }

    def narrow(name: str):
        count = windows[name][2]
        return mock.patch.object(hopper_kernel, "put_slots", lambda *sizes: count or slots(*sizes))

    with warming_up():
        for name, config in configs.items():
            with narrow(name):
                layer.passes.forward_backward(config)
    gigabytes = int(layer.passes.routing.count.sum()) * layer.workload.width * layer.dtype.itemsize * 1e-9
    for name, layer.config in configs.items():
        with narrow(name):
            both, gemms = launch_ms(layer, puts=True, tiles=True), launch_ms(layer, puts=False, tiles=True)
            (put,) = launch_ms(layer, puts=True, tiles=False)
            result = {"put_ms": put, "put_gb_s": gigabytes / put * 1e3, **layer.compare()}
        for direction, ms, gemm in zip(("forward", "backward"), both, gemms, strict=True):
            hidden = (gemm + put - ms) / min(gemm, put)
            result[direction] = {"ms": ms, "gemm_ms": gemm, "eta": max(gemm, put) / ms, "hidden": hidden}
        yield {name: result}


def launch_ms(layer: Layer, *, puts: bool, tiles: bool) -> list[float]:
    """Milliseconds of the overlap launch of a forward and, with tiles, a backward, with these tasks only."""
    forward, backward = layer.passes.exchanges(layer.config)
    rounds, warmup = (9, 2) if layer.on_gpu else (1, 0)
    with shortened(Clock(layer.device), puts, tiles) as ms:
        for _ in range(rounds + warmup):
            for exchange in (forward, backward):
                # Without puts all rows count as arrived.
                exchange.arrived.local.fill_(0 if puts else 2**62)
            _, saved = layer.passes.begin(layer.config)
            if tiles:
                layer.passes.backward(layer.config, saved)
            forward.release(saved.opened)
    for exchange in (forward, backward):
        exchange.arrived.local.zero_()
        exchange.check()
    directions = 2 if tiles else 1
    return [statistics.median(ms[directions * warmup + i :: directions]) for i in range(directions)]


@contextmanager
def shortened(clock: Clock, puts: bool, tiles: bool) -> Iterator[list[float]]:
    """A context in which passes only put or multiply, without combine. -> ms of their overlap launches."""
    launch, schedule, ms = overlap._launch, Exchange.schedule, []

    def timed(*arguments: Any) -> None:
        ms.append(clock.once(partial(launch, *arguments)))

    def without(exchange: Exchange, opened, count: Tensor) -> None:
        schedule(exchange, opened, count)
        for word, is_kept in ((NUM_PUTS, puts), (NUM_TILES, tiles)):
            if not is_kept:
                opened.state.table[word.value] = 0

    patch = mock.patch.object
    with patch(overlap, "_launch", timed), patch(Exchange, "schedule", without), patch(overlap, "_combine"):
        yield ms


def shapes(device: torch.device) -> Results:
    """Other activations, one expert, many experts; uneven numbers of tokens and skewed routing."""
    silu = Workload("silu", 1000, 512, 576, 4, 2, "silu")
    one = replace(MIDDLE, name="one expert", experts=1, choices=1)
    for workload in (silu, one, replace(MIDDLE, name="many experts", experts=256)):
        yield {workload.name: Layer(workload, device).compare()}
    layer = Layer(MIDDLE, device)
    most = layer.workload.tokens
    for tokens, skew in ((most, 1.0), (most, 4.0), (most // 3, 1.0), (1, 0.0), (0, 0.0), (most, 0.5)):
        layer.passes.route(tokens, most, skew)
        yield {f"{tokens} tokens, skew {skew:g}": layer.compare()}


def passes(device: torch.device) -> Results:
    """Open passes of two layers through one exchange; a third one, which is refused, and one without room."""
    layer = Layer(MIDDLE, device)
    yield {"alone": layer.compare()}
    p, config, w = layer.passes, layer.config, layer.workload
    compiled = variants()
    mine, other = p.experts, replace(p.experts, w1=p.experts.w1.flip(0), w2=p.experts.w2.flip(0))
    p.experts = other
    _, second = p.begin(config)
    p.experts = mine
    y, first = p.begin(config)
    yield {"third": refused(lambda: p.begin(config))}
    dx = p.backward(config, first).dx
    p.experts = other
    p.backward(config, second)
    p.experts = mine
    expected = dict(zip(("y", "dx"), by_torch(p.x, p.dy, p.routing, mine), strict=False))
    yield {"two open": agreement({"y": y, "dx": dx}, expected, layer.dtype)}
    yield {"variants": {"right": variants() == compiled, **variants()}}
    sizes = most_rows(w, 1) | {"receive_rows": int(p.routing.count.sum()) // 2, "local_experts": w.experts}
    rows: dict[str, Any] = {"width": w.width, "dtype": layer.dtype, "chunk_rows": config.gemm.block_m}
    small = Exchange(p.memory, "too small", **sizes | rows)
    y, _ = overlap.moe_forward(small, p.x, p.routing, mine, config)
    yield {"does not fit": refused(small.check), "after it": layer.compare()}
    yield {"of what did not fit": {"right": bool(y.isnan().any())}}


def refused(call: Callable[[], object]) -> dict:
    try:
        return {"right": False, "gave": str(call())}
    except UserError as error:
        return {"right": True, "said": str(error)}


def planned_step(device: torch.device) -> Results:
    """GPT2-S-MoE of the paper, as one of 16 ranks on an emulated wire, with each strategy."""
    # Each strategy costs 15 to 30 s on the host before it runs.
    model = "--model gpt2-s-moe --batch 24 --rounds 8"
    if device.type == "cpu":
        model = "--model gpt2-tiny-moe --batch 2 --device cpu --rounds 1 --warmup 0"
    yield from benchmark(f"overlap {model}", "none,tutel,lancet-dw,lancet")


def wire(device: torch.device) -> Results:
    """Products alone, and beside a message of the emulated wire, which must not slow them down."""
    x, y = (torch.randn(16384, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    stream = torch.cuda.Stream(device)

    def products() -> None:
        for _ in range(6):
            x.T @ y @ x.T

    def beside() -> None:
        sleep_on_stream(stream, 40_000_000)
        products()

    clock = Clock(device)
    times = clock.rounds({"alone": products, "beside a message": beside}, 15, 3)
    yield {name: {"ms": statistics.median(ms)} for name, ms in times.items()}


def large_step(device: torch.device) -> Results:
    """The same with products so long that the host is ahead of the GPU; with strategy auto."""
    rounds = "--rounds 8" if device.type == "cuda" else "--device cpu --rounds 1 --warmup 0"
    yield from benchmark(f"bench/gpu/large_step.py:large_step {rounds}", "none,tutel,lancet-dw,lancet,auto")


def benchmark(step: str, strategies: str) -> Results:
    """`lancet bench` of a step on one of 16 ranks."""
    options = f"--stands-for 16 --share 0.4 --strategies {strategies} --json"
    figures = json.loads(output_of("-m", "lancet_kernels", "bench", *step.split(), *options.split()))
    yield {"link_gbps": figures["link_gbps"], "prediction_error": figures["prediction_error"]}
    for name, ms in figures["iteration_ms"].items():
        account = figures["account_ms"][name]
        times = {"exposed_ms": account.get("exposed all_to_all"), "account_ms": account}
        yield {name: {"ms": ms, "predicted_ms": figures["predicted_ms"].get(name), **times}}


def host(device: torch.device) -> Results:
    """A step of GPT2-S-MoE on one rank: times of the host that issues it, of the GPU, and of both.

    Plain, with a plan, with one whose computation is compiled, with one of fused layers, and in CUDA graphs.
    """
    on_gpu = device.type == "cuda"
    config, batch = model_config("gpt2-s-moe" if on_gpu else "gpt2-tiny-moe"), 24 if on_gpu else 2
    with device:
        step = TrainingStep(GPT2MoE(config), 1, autocast=torch.bfloat16 if on_gpu else None)
        tokens = torch.randint(config.vocab, (2, batch, config.sequence))
    inputs = (tokens[0], tokens[1])
    plan = partial(optimize, step, inputs, strategy="lancet-dw", cluster="dgx-h100")
    compiled = partial(plan, inner_compile="inductor")
    fused = partial(plan, backend="fused", lowering="fused")
    contenders: dict[str, Callable[[], Callable]] = {"plain": lambda: step, "plan": plan}
    if on_gpu:
        contenders |= {"fused": fused, "fused, graphed": lambda: GraphedStep(fused(), inputs)}
        contenders |= {"compiled, graphed": lambda: GraphedStep(compiled(), inputs), "compiled": compiled}

    def run(module: Callable) -> None:
        step.zero_grad(set_to_none=True)
        module(*inputs).objective.backward()

    for name, build in contenders.items():
        module = build()
        # A graph is forward and backward.
        call = partial(module, *inputs) if "graphed" in name else partial(run, module)
        yield {name: host_and_device(call, device)}
        if isinstance(module, OptimizedModule) and name == "plan":
            # Without autograd, guards and the call, for the host's time of the ops themselves.
            yield {"graph of the plan": host_and_device(module.run_as_a_whole(), device)}


def host_and_device(run: Callable[[], object], device: torch.device) -> dict:
    """Milliseconds of a run, of the host that issues it, and of all kernels; the number of kernels."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    runs = 10 if device.type == "cuda" else 1
    whole, issued = [], []
    for _ in range(3 + runs):
        synchronize()
        begin = time.perf_counter()
        run()
        issued.append((time.perf_counter() - begin) * 1e3)
        synchronize()
        whole.append((time.perf_counter() - begin) * 1e3)
    result = {"ms": statistics.median(whole[-runs:]), "host_ms": statistics.median(issued[-runs:])}
    with torch.profiler.profile() as profile:
        run()
        synchronize()
    kernels = [each for each in profile.events() if each.device_type.name == "CUDA"]
    busy_ms = sum(each.device_time_total for each in kernels) * 1e-3
    return result | {"kernels": len(kernels), "kernels_ms": busy_ms}


def output_of(*arguments: str) -> str:
    """The output of Python with these arguments; if that fails, this step fails."""
    process = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    print(process.stdout, flush=True)
    if process.returncode:
        sys.exit(process.returncode)
    return process.stdout


def run_tests(
    tests: tuple[str, ...], on_gpu: str, on_cpu: str, processes: int, device: torch.device
) -> Results:
    """The outcome of each test, as soon as it ends."""
    chosen = ("gpu", on_gpu) if device.type == "cuda" else ("not gpu and not long", on_cpu)
    # Eager, because loading a module waits for running kernels, which may wait for one another.
    command = ["env", "CUDA_MODULE_LOADING=EAGER", sys.executable, "-m", "pytest", "-v", "--color=no"]
    command += ["-p", "no:cacheprovider", "-m", chosen[0], "-k", chosen[1]]
    command += [f"tests/{name}" for name in tests]
    if processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    outcome = "(?P<outcome>PASSED|FAILED|ERROR|SKIPPED)"
    for line in process.stdout or ():
        print(line, end="", flush=True)
        # One process prints "file::test OUTCOME", several "[gw0] [ 16%] OUTCOME file::test".
        if match := re.match(rf"\S+::(?P<test>.+?) {outcome}\b", line) or re.match(
            rf"\[gw\d+\] .*?{outcome} \S+?::(?P<test>.+?)\s*$", line
        ):
            right = match["outcome"] in ("PASSED", "SKIPPED")
            yield {match["test"]: {"right": right, "outcome": match["outcome"].lower()}}
    yield {"pytest": {"right": process.wait() == 0, "exit": process.returncode}}


def counters(device: torch.device) -> Results:
    """Use of tensor cores, L2 and memory in the overlap launches of a forward and a backward."""
    metrics = (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "lts__t_sector_hit_rate.pct",
        "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum",
    )  # fmt: skip
    if shutil.which("ncu") is None:
        yield {"ncu": "not on this machine"}
        return
    command = ["ncu", "--clock-control", "none", "--kernel-name", "regex:overlap_kernel", "--csv"]
    command += ["--launch-count", "2", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "bench.gpu.steps", "all_programs", str(device)]
    ncu = subprocess.run(command, capture_output=True, text=True)
    print(ncu.stdout[-8000:], ncu.stderr[-2000:])
    lines = [line.strip('"').split('","') for line in ncu.stdout.splitlines() if line.startswith('"')]
    yield {"exit": ncu.returncode, "metrics": [line[-3:] for line in lines]}


def ranks_on_one_gpu(device: torch.device) -> Results:
    """Two ranks that share the GPU, over torch's symmetric memory."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    where = "one-gpu" if device.type == "cuda" else "cpu"
    yield json.loads(output_of(*ranks, "-m", "bench.gpu.several_ranks", where).splitlines()[-1])


def main(name: str, device: str) -> None:
    alone = (
        machine,
        one_program,
        all_programs,
        wire,
        planned_step,
        large_step,
        host,
        eta,
        counters,
        shapes,
        passes,
    )
    run: dict[str, Callable[[torch.device], Results]] = {
        **{step.__name__: step for step in (*alone, ranks_on_one_gpu)},
        **{step: partial(speed, workload) for step, workload in SPEEDS.items()},
        **{step: partial(run_tests, *tests) for step, tests in TESTS.items()},
    }
    for result in run[name](torch.device(device)):
        # Four digits of each number.
        short = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.4g}"))
        print(FACT + json.dumps(short), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
