"""How long does a plan take, and an order? Models on a cluster file; on the CPU, real sizes everywhere."""

from dataclasses import replace

import pytest

from bench.cpu.fsdp_step import SHAPES, captured
from bench.cpu.memory_limit import slow_link
from lancet_kernels.schedules.order.best_order import best_order
from lancet_kernels.schedules.partition.partition_range import PartitionOptions
from lancet_kernels.schedules.strategies import PlanningOptions
from lancet_kernels.schedules.time.peak_memory import peak_memory
from lancet_kernels.simulation.simulate import Setting


@pytest.mark.parametrize("strategy", ["tutel", "lancet-dw", "lancet"])
@pytest.mark.parametrize("model", ["gpt2-s-moe", "gpt2-l-moe"])
def bench_planning(benchmark, measure, model, strategy) -> None:
    setting = Setting(model, "p4de", 16, layers=None if benchmark.enabled else 2)
    step = setting.priced
    options = PlanningOptions(PartitionOptions.from_environment(), setting.hardware.memory_gb)
    measure(
        # A planner anew each time: it remembers what it planned.
        lambda: step.planner(options).plan(strategy),
        group=f"planning {model}",
        name=strategy,
        ours=False,
        rounds=1,
        warmup=0,
    )


@pytest.mark.parametrize("more_memory", [None, 1.03, 1.1])
def bench_order(benchmark, measure, more_memory) -> None:
    """The best order of 10,000 instructions with FSDP, within a limit in peaks of the original order."""
    shape = replace(SHAPES["qwen3-like"], layers=47 if benchmark.enabled else 2)
    with captured(shape) as step:
        program = step.program
    cost = slow_link(shape, 5.0)
    limit = None if more_memory is None else more_memory * peak_memory(program)
    measure(
        lambda: best_order(program, cost, memory_limit_bytes=limit),
        group=f"the best order of {len(program):,} instructions",
        name="no limit" if limit is None else f"{more_memory} peaks",
        ours=False,
        rounds=1,
        warmup=0,
    )
