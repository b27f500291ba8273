"""How long does a plan take? Models on a cluster file; on the CPU, real sizes everywhere."""

import pytest

from lancet_kernels.predict.simulate import Setting
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.strategies import PlanningOptions


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
