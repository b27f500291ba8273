"""How long does a plan take? The paper's models on a cluster file; on the CPU, real sizes everywhere."""

import pytest

from lancet_kernels.schedules.partition_range import PartitionOptions
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.simulation import Setting


@pytest.mark.parametrize("strategy", ["tutel", "lancet-dw", "lancet"])
@pytest.mark.parametrize("model", ["gpt2-s-moe", "gpt2-l-moe"])
def bench_planning(measure, model, strategy) -> None:
    setting = Setting(model, "p4de", 16)
    program, cost = setting.program(), setting.cost()
    options = PlanningOptions(PartitionOptions.from_environment(), setting.hardware.memory_gb)
    measure(
        # A planner anew each time: it remembers what it planned.
        lambda: Planner(program, cost, options).plan(strategy),
        group=f"planning {model}",
        name=strategy,
        ours=False,
        rounds=1,
        warmup=0,
    )
