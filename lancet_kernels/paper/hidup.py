"""HiDup's experiments by simulation: which strategies are found, and how they compare (sections 6.2 to 6.12).

A setting is a model on a number of GPUs of a cluster. Its forward is captured for one device, on one of two
microbatches of the batch of all GPUs together; costs come from the cluster file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from lancet_kernels.fake_ranks import without_contents
from lancet_kernels.graph.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs import CostModel
from lancet_kernels.graph.forms import Form, cut
from lancet_kernels.graph.forward_program import forward_program
from lancet_kernels.graph.program import Program
from lancet_kernels.paper.hidup_models import HIDUP_MODELS, HiDupModel, example_batch, hidup_config
from lancet_kernels.schedules.blocks import Block, BlockSignature
from lancet_kernels.schedules.sharding import Strategy, search_sharding
from lancet_kernels.schedules.sharding_costs import BACKWARD, COPIES
from lancet_kernels.schedules.sharding_search import Restriction

SEQUENCES = 32
"""A GPU's batch. The paper does not say; with 32 computation takes about as long as in its table 4."""
PRODUCTS = ("gate", "dispatch", "expert, up", "expert, down", "combine")
NORM = 10
"""Instructions in front of the gate's product that still belong to the layer."""
ASSUMPTIONS = (
    "by simulation: times come from the cluster file (roofline and links), not from GPUs",
    f"{SEQUENCES} sequences a GPU, of 128 tokens or 64 patches; capacity factor 1.25; float32; "
    "attention is one kernel",
    f"backward computes {BACKWARD:g} times as much as forward; gradients travel by the adjoint collectives",
    "hidup: both microbatches in turns, psi of equation (5). Baselines run the whole batch at once: expert "
    "parallel (DeepSpeed's and FastMoE's) overlaps nothing, data parallel (DDP, Horovod) its all-reduces "
    "with the backward. They are priced as both microbatches without the second launches and latencies",
    "an all-reduce takes as long as a reduce-scatter and an all-gather",
)


@dataclass(frozen=True)
class HiDupSetting:
    """A model on GPUs. gbit_per_s: between machines of 4 GPUs (section 6.4); None: machines of 8 GPUs."""

    model: str
    gpus: int
    gbit_per_s: float | None = None
    layers: int | None = None

    @property
    def cluster(self) -> Cluster:
        cluster = load_cluster("hidup-v100")
        if self.gbit_per_s is None:
            return cluster
        return replace(cluster, gpus_per_node=4, inter_node_gb_per_s=self.gbit_per_s / 8)

    @property
    def cost(self) -> CostModel:
        return CostModel.for_cluster(self.cluster, self.gpus)

    @property
    def program(self) -> Program:
        return captured(self.model, self.gpus, self.layers)

    @cached_property
    def hidup(self) -> Strategy:
        """The strategy found."""
        return search_sharding(self.program, self.gpus, self.cost, memory_gb=self.cluster.memory_gb)

    @cached_property
    def expert_parallel(self) -> Strategy:
        """GShard's: experts on their ranks, all else data parallel, all-to-alls between."""
        restriction = Restriction(self._rests_by_expert, frozenset({"all_to_all"}), self._reads_its_experts)
        return self._restricted("expert parallel", restriction)

    @cached_property
    def data_parallel(self) -> Strategy:
        """Every parameter whole on every rank, no collective but the all-reduce of gradients."""
        return self._restricted("data parallel", Restriction(lambda name, form: not form.is_cut, frozenset()))

    def _rests_by_expert(self, name: str, form: Form) -> bool:
        return form == cut(0) if self._is_expert(name) else not form.is_cut

    def _reads_its_experts(self, block: Block, signature: BlockSignature) -> bool:
        pairs = zip(block.parameters, signature.parameters, strict=True)
        return all(form == cut(0) for t, form in pairs if self._is_expert(t))

    def _is_expert(self, parameter: str) -> bool:
        return len(self.program.tensors[parameter].shape) == 3

    def _restricted(self, name: str, restriction: Restriction) -> Strategy:
        return search_sharding(self.program, self.gpus, self.cost, restriction=restriction, name=name)

    def whole_batch_ms(self, strategy: Strategy, *, overlaps_gradients: bool) -> float:
        """An iteration without duplex: computation and all-to-alls one after the other; all-reduces of
        gradients beside the backward, or behind it."""
        kernels = sum(len(stage.computation) for stage in strategy.stages)
        launches = kernels * (1 + BACKWARD) * self.cluster.launch_us * 1e-3
        compute = strategy.computation_ms - launches
        messages = [c for stage in strategy.stages for c in stage.communication]
        # Parameters are never gathered here: the restrictions see to that.
        gradients = COPIES * sum(c.backward_ms for c in messages if c.tensor in strategy.parameters)
        model = self.cost.communication
        activations = sum(
            COPIES * (c.ms + c.backward_ms) - 2 * model.latency(c.collective)
            for c in messages
            if c.tensor not in strategy.parameters
        )
        if overlaps_gradients:
            gradients = max(0.0, gradients - compute * BACKWARD / (1 + BACKWARD))
        return compute + activations + gradients

    @property
    def baselines(self) -> dict[str, float]:
        """Milliseconds of an iteration; data parallel only within one machine, as in the paper, and where it
        fits into memory."""
        found = {"expert parallel": self.whole_batch_ms(self.expert_parallel, overlaps_gradients=False)}
        fits = self.data_parallel.memory_bytes <= self.cluster.memory_gb * 1e9
        if fits and self.gpus <= self.cluster.gpus_per_node:
            found["data parallel"] = self.whole_batch_ms(self.data_parallel, overlaps_gradients=True)
        return found

    def row(self) -> dict[str, object]:
        """What is shown of a setting, as JSON values."""
        best = min(self.baselines.values())
        parameters = self.hidup.parameters.values()
        return {
            "model": self.model,
            "gpus": self.gpus,
            "gbit_per_s": self.gbit_per_s,
            "hidup_ms": self.hidup.predicted_ms,
            "lower_bound_ms": self.hidup.lower_bound_ms,
            "baselines_ms": self.baselines,
            "speedup": best / self.hidup.predicted_ms,
            "overlapped": self.hidup.overlapped,
            "stages": len(self.hidup.stages),
            "sharded": sum(form.is_cut for form in parameters),
            "replicated": sum(not form.is_cut for form in parameters),
            "memory_gb": self.hidup.memory_bytes / 1e9,
        }


@lru_cache(maxsize=16)
def captured(model: str, gpus: int, layers: int | None = None) -> Program:
    """The forward of one microbatch of all GPUs' batch."""
    config = hidup_config(model, gpus, layers)
    with without_contents():
        module = HiDupModel(config)
        batch = example_batch(config, SEQUENCES * gpus // COPIES)
    return forward_program(module, batch, f"{model}, {gpus} GPUs, a microbatch of {len(batch[0])}")


def moe_layer(setting: HiDupSetting) -> list[str]:
    """How the first MoE layer is partitioned (figure 12): what is communicated, and the forms of its five
    products (gate, dispatch, up, down, combine) in their order."""
    program = setting.program
    products = [i.name for i in program.instructions if i.op == "aten.bmm"][: len(PRODUCTS)]
    names = dict(zip(products, PRODUCTS, strict=True))
    first, last = (program.index[products[n]] for n in (0, -1))
    lines = []
    for n, stage in enumerate(setting.hidup.stages):
        for c in stage.communication:
            made_by = program.producer.get(c.tensor)
            behind_norm = made_by is not None and first - NORM <= made_by <= last
            if behind_norm:
                lines.append(f"stage {n}: {c.collective} of {c.tensor}, {c.source} -> {c.target}")
        for name, forms in stage.computation.items():
            if name in names:
                lines.append(f"stage {n}: {names[name]} ({', '.join(map(str, forms))})")
    return lines


def figure6(layers: int | None = None) -> list[dict[str, object]]:
    """8 machines: 16 and 64 GPUs."""
    return [HiDupSetting(m, gpus, layers=layers).row() for m in HIDUP_MODELS for gpus in (16, 64)]


def figure7(layers: int | None = None) -> list[dict[str, object]]:
    """One machine of 8 GPUs."""
    return [HiDupSetting(m, 8, layers=layers).row() for m in HIDUP_MODELS]


def figure8(layers: int | None = None) -> list[dict[str, object]]:
    """Two machines of 4 GPUs, three bandwidths between them."""
    return [
        HiDupSetting(m, 8, gbit, layers).row() for m in ("bert-sgmoe", "vit-sgmoe") for gbit in (10, 30, 100)
    ]


def figure11(layers: int | None = None) -> list[dict[str, object]]:
    """Parameters of BERT-SGMoE replicated or sharded, by bandwidth."""
    rows = [HiDupSetting("bert-sgmoe", 8, gbit, layers).row() for gbit in (10, 30, 100)]
    return [{k: row[k] for k in ("gbit_per_s", "replicated", "sharded")} for row in rows]


def figure12(layers: int | None = None) -> list[dict[str, object]]:
    """The first MoE layer of BERT-SGMoE at 100 and 10 Gbit/s."""
    return [
        {"gbit_per_s": gbit, "layer": moe_layer(HiDupSetting("bert-sgmoe", 8, gbit, layers))}
        for gbit in (100, 10)
    ]


def figure14(layers: int | None = None) -> dict[str, list[dict[str, object]]]:
    """Seconds of the search over layers (4 GPUs) and over GPUs (6 layers)."""

    def searched(gpus: int, count: int) -> dict[str, object]:
        setting = HiDupSetting("bert-sgmoe", gpus, layers=count)
        program = setting.program
        begin = time.process_time()
        search_sharding(program, gpus, setting.cost)
        return {"layers": count, "gpus": gpus, "seconds": time.process_time() - begin}

    most = layers or 8
    by_layers = [searched(4, count) for count in range(2, most + 1, 2)]
    return {"layers": by_layers, "gpus": [searched(gpus, min(6, most)) for gpus in (2, 4, 8)]}


FIGURES: dict[str, Callable] = {
    "6": figure6,
    "7": figure7,
    "8": figure8,
    "11": figure11,
    "12": figure12,
    "14": figure14,
}


WHY = {
    "figure 11: more parameters sharded at high bandwidth": "here an all-reduce takes as long as a "
    "reduce-scatter and an all-gather, so slices cost nothing more and spread messages over forward and "
    "backward; the paper's NCCL sums faster in one go",
    "figure 12: at 100 Gbit/s GShard's all-to-alls around the experts": "with two machines, whose all-reduce "
    "adds up inside each first, gradients of whole experts cost no more than the tokens' all-to-alls",
}
"""Where ours differs from the paper, and why."""


def claims(figures: dict) -> list[dict[str, object]]:
    """What the paper says, what is found here, and whether it holds."""
    found: list[dict[str, object]] = []

    def claim(name: str, paper: object, ours: object, holds: bool) -> None:
        entry = {"name": name, "paper": paper, "ours": ours, "holds": bool(holds)}
        found.append(entry if holds or name not in WHY else entry | {"why": WHY[name]})

    if "6" in figures:
        most = max(row["speedup"] for row in figures["6"])
        claim("figure 6: most speedup over the best baseline", 1.61, round(most, 2), most >= 1.3)
        vit = max(row["speedup"] for row in figures["6"] if row["model"].startswith("vit"))
        bert = max(row["speedup"] for row in figures["6"] if row["model"].startswith("bert"))
        claim(
            "figure 6: ViT gains more than BERT", "61 % and 18 %", f"{vit:.2f}x and {bert:.2f}x", vit > bert
        )
    if "7" in figures:
        speedups = [row["speedup"] for row in figures["7"]]
        text = f"{min(speedups):.2f}x to {max(speedups):.2f}x"
        claim("figure 7: on a par within a machine", "comparable", text, min(speedups) >= 0.95)
    if "8" in figures:
        speedups = [row["speedup"] for row in figures["8"]]
        text = f"{min(speedups):.2f}x to {max(speedups):.2f}x"
        claim("figure 8: faster at every bandwidth", "up to 14 %", text, min(speedups) >= 1)
        bert = {r["gbit_per_s"]: r["overlapped"] for r in figures["8"] if r["model"] == "bert-sgmoe"}
        claim(
            "table 4: share overlapped at 100 and 30 Gbit/s",
            "41 % and 26 %",
            f"{bert[100]:.0%} and {bert[30]:.0%}",
            bert[100] > bert[30],
        )
    if "11" in figures:
        sharded = {row["gbit_per_s"]: row["sharded"] for row in figures["11"]}
        claim(
            "figure 11: more parameters sharded at high bandwidth",
            "replicated at low, sharded at high bandwidth",
            f"sharded at 10, 30, 100 Gbit/s: {', '.join(str(n) for n in sharded.values())}",
            sharded[100] > sharded[10],
        )
    if "12" in figures:
        layers = {row["gbit_per_s"]: row["layer"] for row in figures["12"]}
        exchanged = sum("all_to_all" in line for line in layers[100])
        claim(
            "figure 12: at 100 Gbit/s GShard's all-to-alls around the experts",
            "two all-to-alls",
            f"{exchanged} all-to-alls",
            exchanged >= 2,
        )
        on_every_card = any("gate (whole, whole, whole)" in line for line in layers[10])
        claim(
            "figure 12: at 10 Gbit/s the gate is computed on every card",
            "whole gate",
            "whole gate" if on_every_card else "gate on a rank's own tokens",
            on_every_card,
        )
    if "14" in figures:
        rows = figures["14"]["layers"]
        growth = rows[-1]["seconds"] / rows[0]["seconds"]
        linear = rows[-1]["layers"] / rows[0]["layers"]
        claim(
            "figure 14a: linear in layers",
            "linear",
            f"{growth:.1f}x for {linear:.0f}x layers",
            growth < 2 * linear,
        )
        seconds = [row["seconds"] for row in figures["14"]["gpus"]]
        text = f"{min(seconds):.1f} to {max(seconds):.1f} s"
        claim("figure 14b: independent of GPUs", "constant", text, max(seconds) < 2 * min(seconds))
    return found


def text(figures: dict) -> str:
    """Figures and claims as text."""
    lines = ["HiDup by simulation", *(f"  {line}" for line in ASSUMPTIONS)]
    for number in ("6", "7", "8"):
        if number in figures:
            head = f"{'model':<12}{'GPUs':>5}{'Gbit/s':>8}{'hidup ms':>10}{'at least':>10}"
            lines += ["", f"Figure {number}", f"{head}{'best other':>12}{'speedup':>9}{'overlapped':>12}"]
            lines += [
                f"{r['model']:<12}{r['gpus']:>5}{r['gbit_per_s'] or '':>8}{r['hidup_ms']:>10.1f}"
                f"{r['lower_bound_ms']:>10.1f}{min(r['baselines_ms'].values()):>12.1f}{r['speedup']:>8.2f}x"
                f"{r['overlapped']:>12.0%}"
                for r in figures[number]
            ]
    for row in figures.get("11", ()):
        lines.append(
            f"Figure 11, {row['gbit_per_s']} Gbit/s: {row['replicated']} parameters replicated, "
            f"{row['sharded']} sharded"
        )
    for row in figures.get("12", ()):
        lines += ["", f"Figure 12, {row['gbit_per_s']} Gbit/s", *(f"  {line}" for line in row["layer"])]
    for rows in figures.get("14", {}).values():
        lines += [
            f"Figure 14: {r['layers']} layers, {r['gpus']} GPUs: {r['seconds']:.1f} s of CPU time"
            for r in rows
        ]
    lines += ["", f"{'claim':<66}{'paper':<46}{'here':<42}holds"]
    for c in claims(figures):
        lines.append(f"{c['name']:<66}{c['paper']!s:<46}{c['ours']!s:<42}{'yes' if c['holds'] else 'no'}")
        lines += [f"    why: {c['why']}"] if "why" in c else []
    return "\n".join(lines)
