"""HiDup's experiments by simulation: which strategies are found, and how they compare (sections 6.2 to 6.12).

A setting is a model on a number of GPUs of a cluster. Its forward is captured for one device, on one of two
microbatches of the batch of all GPUs together; costs come from the cluster file and `paper.hidup_links`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from multiprocessing import get_context
from statistics import mean

from lancet_kernels.environment import cpu_cores
from lancet_kernels.fake_ranks import without_contents
from lancet_kernels.graph.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs import Cost, CostModel
from lancet_kernels.graph.forward_program import forward_program
from lancet_kernels.graph.program import Instruction, Program, TensorSpec
from lancet_kernels.paper.hidup_links import links, with_bandwidth
from lancet_kernels.paper.hidup_models import HIDUP_MODELS, HiDupModel, example_batch, hidup_config
from lancet_kernels.schedules.sharding import search_sharding
from lancet_kernels.schedules.sharding_baselines import baseline
from lancet_kernels.schedules.sharding_costs import BACKWARD, COPIES
from lancet_kernels.schedules.sharding_strategy import Strategy
from lancet_kernels.schedules.sharding_times import repriced

SEQUENCES = 32
"""A GPU's batch, as in the code that the paper's authors published."""
PRODUCTS = ("gate", "dispatch", "expert, up", "expert, down", "combine")
NORM = 10
"""Instructions in front of the gate's product that still belong to the layer."""
NOISY_RUNS = 10
BANDWIDTHS = (10, 30, 100)
"""Gbit/s between two machines."""
ASSUMPTIONS = (
    "by simulation: computation by a roofline of the V100, collectives by formulas for NCCL's rings and "
    "trees, inside a machine at the rates that the paper's authors measured. Nothing ran on GPUs",
    f"{SEQUENCES} sequences a GPU, of 128 tokens or 64 patches; capacity 1.25 times the even share, counted "
    "for each sequence; float32; attention is one kernel",
    "figure 6: 8 machines with 2 and 8 GPUs each; figure 7: one machine with 8; figures 8, 11, 12 and tables "
    "4, 5: two machines with 4 each (table 4, one machine: 4)",
    f"backward computes {BACKWARD:g} times as much as forward; gradients travel by the adjoint collectives",
    "hidup: both microbatches in turns, psi of equation (5), in the backward as well. Searched as published: "
    "the backward counted without overlap, as in the searcher that the paper's authors published",
    "baselines run the whole batch at once with the same layers: expert parallel (as DeepSpeed and FastMoE "
    "do) overlaps nothing, data parallel (DDP, Horovod) overlaps its all-reduces with the backward",
    "an all-reduce between two machines is NCCL's tree, which the tensor leaves a machine once; all-gather "
    "and reduce-scatter are rings through all GPUs. A 100 Gbit/s link is used at 70 %, as the authors "
    "measured",
)


@dataclass(frozen=True)
class HiDupSetting:
    """A model on GPUs that are spread evenly over machines. gbit_per_s: between machines (None: 9.71, the
    public cloud of section 6.1)."""

    model: str
    gpus: int
    machines: int = 1
    gbit_per_s: float | None = None
    layers: int | None = None

    @property
    def cluster(self) -> Cluster:
        cluster = load_cluster("hidup-v100")
        in_machine = self.gpus // self.machines
        if self.gbit_per_s is None:
            return replace(cluster, gpus_per_node=in_machine)
        return with_bandwidth(cluster, self.gbit_per_s, in_machine)

    @property
    def cost(self) -> CostModel:
        return CostModel(self.cluster, links(self.cluster, self.gpus))

    @property
    def program(self) -> Program:
        """The forward of one of two microbatches."""
        return captured(self.model, self.gpus, SEQUENCES * self.gpus // COPIES, self.layers)

    @property
    def whole_batch(self) -> Program:
        """The forward of the whole batch, as baselines run it."""
        return captured(self.model, self.gpus, SEQUENCES * self.gpus, self.layers)

    @cached_property
    def hidup(self) -> Strategy:
        """The strategy of the search."""
        return search_sharding(self.program, self.gpus, self.cost, memory_gb=self.cluster.memory_gb)

    @cached_property
    def published(self) -> Strategy:
        """The strategy if the backward is counted without overlap; its prediction counts so, too."""
        return search_sharding(
            self.program,
            self.gpus,
            self.cost,
            memory_gb=self.cluster.memory_gb,
            name="hidup, searched as published",
            overlaps_backward=False,
        )

    @cached_property
    def expert_parallel(self) -> Strategy:
        """GShard's, on the whole batch: experts on their ranks, all-to-alls around; else data parallel."""
        return baseline("expert parallel", self.whole_batch, self.gpus, self.cost)

    @cached_property
    def data_parallel(self) -> Strategy:
        """Every parameter whole on every rank, no collective but all-reduces of gradients; whole batch."""
        return baseline("data parallel", self.whole_batch, self.gpus, self.cost)

    @property
    def baselines(self) -> dict[str, WholeBatch]:
        """What others need for an iteration; data parallel only within one machine, as in the paper, and
        where it fits into memory."""
        times = {"expert parallel": WholeBatch.of(self.expert_parallel, overlaps_gradients=False)}
        fits = self.data_parallel.memory_bytes <= self.cluster.memory_gb * 1e9
        if fits and self.machines == 1:
            times["data parallel"] = WholeBatch.of(self.data_parallel, overlaps_gradients=True)
        return times

    def row(self) -> dict[str, object]:
        """What is shown of a setting, as JSON values."""
        baselines = {name: times.wall_ms for name, times in self.baselines.items()}
        parameters = self.hidup.parameters.values()
        return {
            "model": self.model,
            "gpus": self.gpus,
            "machines": self.machines,
            "gbit_per_s": self.gbit_per_s,
            "hidup_ms": self.hidup.predicted_ms,
            "lower_bound_ms": self.hidup.lower_bound_ms,
            "baselines_ms": baselines,
            "speedup": min(baselines.values()) / self.hidup.predicted_ms,
            "overlapped": self.hidup.overlapped,
            "stages": len(self.hidup.stages),
            "sharded": sum(form.is_cut for form in parameters),
            "replicated": sum(not form.is_cut for form in parameters),
            "memory_gb": self.hidup.memory_bytes / 1e9,
        }


@dataclass(frozen=True)
class WholeBatch:
    """An iteration without a second microbatch, in milliseconds. hidden_ms: of the communication."""

    computation_ms: float
    communication_ms: float
    hidden_ms: float

    @classmethod
    def of(cls, strategy: Strategy, *, overlaps_gradients: bool) -> WholeBatch:
        """Computation and all-to-alls one after the other; all-reduces of gradients beside the backward, or
        behind it. The restricted strategies gather no parameters."""
        messages = [c for stage in strategy.stages for c in stage.communication]
        # A stage counts half of a gradient's all-reduce, for one microbatch of two.
        gradients = COPIES * sum(c.backward_ms for c in messages if c.tensor in strategy.parameters)
        activations = sum(c.ms + c.backward_ms for c in messages if c.tensor not in strategy.parameters)
        computation = sum(stage.comp_ms + stage.comp_backward_ms for stage in strategy.stages)
        backward = sum(stage.comp_backward_ms for stage in strategy.stages)
        hidden = min(gradients, backward) if overlaps_gradients else 0.0
        return cls(computation, activations + gradients, hidden)

    @property
    def wall_ms(self) -> float:
        """The whole iteration."""
        return self.computation_ms + self.communication_ms - self.hidden_ms


@lru_cache(maxsize=16)
def captured(model: str, gpus: int, sequences: int, layers: int | None = None) -> Program:
    """The forward on so many sequences of all GPUs together."""
    config = hidup_config(model, gpus, layers)
    with without_contents():
        module = HiDupModel(config)
        batch = example_batch(config, sequences)
    return forward_program(module, batch, f"{model}, {gpus} GPUs, {sequences} sequences")


def moe_layer(program: Program, strategy: Strategy) -> list[str]:
    """How the first MoE layer is partitioned (figure 12): what is communicated, and the forms of its five
    products (gate, dispatch, up, down, combine) in their order."""
    products = [i.name for i in program.instructions if i.op == "aten.bmm"][: len(PRODUCTS)]
    names = dict(zip(products, PRODUCTS, strict=True))
    first, last = (program.index[products[n]] for n in (0, -1))
    lines = []
    for n, stage in enumerate(strategy.stages):
        for c in stage.communication:
            producer = program.producer.get(c.tensor)
            behind_norm = producer is not None and first - NORM <= producer <= last
            if behind_norm:
                lines.append(f"stage {n}: {c.collective} of {c.tensor}, {c.source} -> {c.target}")
        for name, forms in stage.computation.items():
            if name in names:
                lines.append(f"stage {n}: {names[name]} ({', '.join(map(str, forms))})")
    return lines


def figure6(layers: int | None = None) -> list[dict[str, object]]:
    """8 machines: 16 and 64 GPUs."""
    return [HiDupSetting(m, gpus, 8, layers=layers).row() for m in HIDUP_MODELS for gpus in (16, 64)]


def figure7(layers: int | None = None) -> list[dict[str, object]]:
    """One machine of 8 GPUs."""
    return [HiDupSetting(m, 8, layers=layers).row() for m in HIDUP_MODELS]


def figure8(layers: int | None = None) -> list[dict[str, object]]:
    """Two machines of 4 GPUs, three bandwidths between them."""
    models = ("bert-sgmoe", "vit-sgmoe")
    return [two_machines(m, gbit, layers).row() for m in models for gbit in BANDWIDTHS]


@lru_cache(maxsize=32)
def two_machines(model: str, gbit_per_s: float, layers: int | None = None) -> HiDupSetting:
    """Two machines of 4 GPUs (sections 6.4 to 6.12)."""
    return HiDupSetting(model, 8, 2, gbit_per_s, layers)


def figure11(layers: int | None = None) -> list[dict[str, object]]:
    """Parameters of BERT-SGMoE replicated or sharded, by bandwidth; as found, and as published."""
    rows: list[dict[str, object]] = []
    for gbit in BANDWIDTHS:
        setting = two_machines("bert-sgmoe", gbit, layers)
        row: dict[str, object] = {"gbit_per_s": gbit}
        for suffix, strategy in (("", setting.hidup), ("_published", setting.published)):
            sharded = sum(form.is_cut for form in strategy.parameters.values())
            row |= {f"replicated{suffix}": len(strategy.parameters) - sharded, f"sharded{suffix}": sharded}
        rows.append(row)
    return rows


def figure12(layers: int | None = None) -> list[dict[str, object]]:
    """The first MoE layer of BERT-SGMoE at 100 and 10 Gbit/s; as found, and as published."""
    rows: list[dict[str, object]] = []
    for gbit in (100, 10):
        setting = two_machines("bert-sgmoe", gbit, layers)
        rows.append(
            {
                "gbit_per_s": gbit,
                "layer": moe_layer(setting.program, setting.hidup),
                "layer_published": moe_layer(setting.program, setting.published),
            }
        )
    return rows


def figure14(layers: int | None = None) -> dict[str, list[dict[str, object]]]:
    """Seconds of the search over layers (4 GPUs; up to three times those of the model) and over GPUs."""

    def searched(gpus: int, count: int) -> dict[str, object]:
        setting = HiDupSetting("bert-sgmoe", gpus, layers=count)
        program = setting.program
        begin = time.process_time()
        search_sharding(program, gpus, setting.cost)
        return {"layers": count, "gpus": gpus, "seconds": time.process_time() - begin}

    most = layers or 8
    by_layers = [searched(4, count) for count in (2, *range(4, most + 1, 4), 2 * most, 3 * most)]
    return {"layers": by_layers, "gpus": [searched(gpus, min(6, most)) for gpus in (2, 4, 8)]}


def table4(layers: int | None = None) -> list[dict[str, object]]:
    """An iteration of BERT-SGMoE taken apart: one machine of 4 GPUs, two with 100 and 30 Gbit/s."""
    settings = {
        "one machine": HiDupSetting("bert-sgmoe", 4, layers=layers),
        "100 Gbit/s": two_machines("bert-sgmoe", 100, layers),
        "30 Gbit/s": two_machines("bert-sgmoe", 30, layers),
    }
    rows: list[dict[str, object]] = []
    for name, setting in settings.items():
        others = WholeBatch.of(setting.expert_parallel, overlaps_gradients=False)
        for system, wall, of, overlapped in (
            ("hidup", setting.hidup.predicted_ms, setting.hidup, setting.hidup.overlapped),
            ("as published", setting.published.predicted_ms, setting.published, setting.published.overlapped),
            ("expert parallel", others.wall_ms, others, 0.0),
        ):
            rows.append(
                {
                    "setting": name,
                    "system": system,
                    "wall_ms": wall,
                    "computation_ms": of.computation_ms,
                    "communication_ms": of.communication_ms,
                    "overlapped": overlapped,
                }
            )
    return rows


def table5(layers: int | None = None) -> list[dict[str, object]]:
    """Strategies found with wrong costs, at the right ones: BERT-SGMoE, 100 Gbit/s (section 6.11)."""
    setting = two_machines("bert-sgmoe", 100, layers)
    program, cost, best = setting.program, setting.cost, setting.hidup.predicted_ms

    def relative(of: Program, wrong: Cost) -> float:
        chosen = search_sharding(of, setting.gpus, wrong, memory_gb=setting.cluster.memory_gb)
        return repriced(chosen, program, cost).predicted_ms / best

    rows: list[dict[str, object]] = []
    for share in (0.2, 0.5):
        times = []
        for seed in range(NOISY_RUNS):
            noisy = NoisyCost(cost, share, random.Random(seed).random())
            times.append(relative(noisy.marked(program), noisy))
        rows.append({"noise": f"{share:.0%} random noise", "relative": mean(times), "most": max(times)})
    for share in (0.2, 0.5, -0.2, -0.5):
        ratio = relative(program, NoisyCost(cost, communication=1 + share))
        rows.append({"noise": f"{share:+.0%} communication", "relative": ratio, "most": ratio})
    return rows


@dataclass(frozen=True)
class NoisyCost:
    """Costs that are off: of every operator by up to `share`, drawn with `seed`; of all communication by the
    factor `communication`."""

    cost: Cost
    share: float = 0.0
    seed: float = 0.0
    communication: float = 1.0

    def marked(self, program: Program) -> Program:
        """The program in which every instruction carries its factor, its parts as well."""
        return replace(
            program,
            instructions=tuple(
                replace(i, attributes={**i.attributes, "factor": self._factor(i.name)})
                for i in program.instructions
            ),
        )

    def _factor(self, name: str) -> float:
        return 1 + self.share * random.Random(f"{self.seed} {name}").uniform(-1, 1)

    def __call__(self, instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> float:
        right = self.cost(instruction, tensors)
        if instruction.kind.is_communication:
            return right * self.communication * self._factor(instruction.name)
        return right * instruction.attributes.get("factor", 1.0)


FIGURES: dict[str, Callable] = {
    "6": figure6,
    "7": figure7,
    "8": figure8,
    "11": figure11,
    "12": figure12,
    "14": figure14,
    "table 4": table4,
    "table 5": table5,
}
SHARED = (("8", "11", "12", "table 4", "table 5"), ("6", "7"), ("14",))
"""Figures that use the same searches, which one process therefore works out; the longest first."""


def run_figures(
    numbers: Sequence[str], layers: int | None, progress: Callable[[int, int], None]
) -> dict[str, object]:
    """Figures by number, worked out by a process per core. Args: progress: called with (done, of)."""
    groups = [chosen for group in SHARED if (chosen := [n for n in group if n in numbers])]
    if len(groups) == 1:
        figures = _figures_of(groups[0], layers)
    else:
        figures = {}
        with ProcessPoolExecutor(cpu_cores(), mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(_figures_of, group, layers) for group in groups]):
                figures |= done.result()
                progress(len(figures), len(numbers))
    return {number: figures[number] for number in numbers}


def _figures_of(numbers: Sequence[str], layers: int | None) -> dict[str, object]:
    return {number: FIGURES[number](layers) for number in numbers}
