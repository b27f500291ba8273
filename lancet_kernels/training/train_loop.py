"""Training a model on text: the loop that `lancet train` runs on every rank.

B  sequences per rank and step      S  sequence length      W  ranks
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from lancet_kernels.errors import UserError
from lancet_kernels.layer import BACKENDS, moe_layers, name_layers, set_routing_step
from lancet_kernels.ops.gates import GATES, parse_gate
from lancet_kernels.ops.groups import Groups, group_of
from lancet_kernels.ops.link import emulate_link, link
from lancet_kernels.ops.waiting import waiting
from lancet_kernels.options import (
    non_negative_float,
    non_negative_int,
    option,
    positive_float,
    positive_float_or_none,
    positive_int,
    probability,
)
from lancet_kernels.planning_flags import PlanningFlags
from lancet_kernels.schedules import STRATEGY_NAMES
from lancet_kernels.training import checkpoint
from lancet_kernels.training.data import Corpus, check_length, load_corpus, training_batch, validation_batches
from lancet_kernels.training.gradients import GradientBuckets, broadcast_replicated, clip_gradients
from lancet_kernels.training.launch import Rank
from lancet_kernels.training.models import MODELS, GPT2MoE, ModelConfig, model_config
from lancet_kernels.training.runs import RunFolder, resolve_run
from lancet_kernels.training.step import TrainingStep

_CHECKPOINTS = "checkpoints"
_RATES = {"adamw": 1e-3, "sgd": 0.1}


@dataclass(frozen=True)
class TrainOptions(PlanningFlags):
    """What to train, on what, how long. The fields are the options of `lancet train`."""

    model: str = option("gpt2-tiny-moe", f"one of {', '.join(MODELS)}", metavar="NAME")
    ranks: int = option(
        2, "processes to start on this machine; under torchrun its world counts", parse=positive_int
    )
    gate: str = option(
        "switch", f"{', '.join(GATES)}; options as in 'topk(renormalize=True)'", metavar="GATE"
    )
    top_k: int | None = option(None, "experts per token (default: 2 for gshard, else 1)", parse=positive_int)
    experts: int | None = option(
        None, "experts in all (default: 2 per rank that shares them)", parse=positive_int
    )
    expert_ranks: int | None = option(
        None, "ranks that share one set of experts; others hold the same (default: all)", parse=positive_int
    )
    capacity_factor: float | None = option(
        1.25, "room per expert, relative to a perfect balance; none: dropless", parse=positive_float_or_none
    )
    data: str | None = option(
        None,
        "text file or folder (default: the sources of Python's standard library)",
        parse=str,
        metavar="PATH",
    )
    tokenizer: str | None = option(None, "tokenizer.json (default: bytes)", parse=str, metavar="FILE")
    steps: int = option(300, "training steps in all", parse=positive_int)
    batch: int = option(8, "sequences per rank and step", parse=positive_int)
    sequence: int | None = option(None, "tokens per sequence (default: the model's)", parse=positive_int)
    optimizer: str = option("adamw", "adamw, or sgd with momentum as in the paper", choices=("adamw", "sgd"))
    lr: float | None = option(
        None, "peak learning rate (default: 1e-3 for adamw, 0.1 for sgd)", parse=positive_float
    )
    momentum: float = option(0.9, "of sgd", parse=non_negative_float)
    weight_decay: float = option(0.0, "of the optimizer", parse=non_negative_float)
    warmup: int = option(
        20, "steps in which the learning rate grows linearly to its peak", parse=non_negative_int
    )
    clip: float | None = option(
        1.0, "largest norm of the whole gradient; none: no clipping", parse=positive_float_or_none
    )
    balance_weight: float = option(0.01, "weight of the load-balance loss", parse=non_negative_float)
    z_weight: float = option(0.0, "weight of the router's z-loss", parse=non_negative_float)
    bias_rate: float = option(0.001, "step of the sigmoid gate's correction bias", parse=non_negative_float)
    dropout: float = option(
        0.0, "probability of zero at embedding, attention and feed-forward output", parse=probability
    )
    seed: int = option(0, "of weights, data order and dropout", parse=non_negative_int)
    validation_batches: int = option(8, "batches of the validation loss", parse=positive_int)
    strategy: str = option(
        "lancet", "how all-to-alls are hidden; none: they are waited for", choices=STRATEGY_NAMES
    )
    plan: str | None = option(
        None, "use this plan, the plan.json of another run of the same step", parse=str, metavar="FILE"
    )
    backend: str = option(
        "torch",
        "fused: MoE layers run as persistent kernels where the plan says so (GPUs, or TRITON_INTERPRET=1)",
        choices=BACKENDS,
    )
    link_gbps: float | None = option(
        None, "emulate a link of this many Gbit/s: pace every all-to-all (CPU ranks)", parse=positive_float
    )
    compare: int = option(
        0,
        "at the end, compare this many iterations of none and the plan on a slow emulated link (CPU ranks)",
        parse=non_negative_int,
    )
    device: str = option(
        "auto", "where to compute; auto: cuda if there is one", choices=("auto", "cpu", "cuda")
    )
    timeout: float = option(300.0, "seconds that a rank waits for another one", parse=positive_float)
    checkpoint_every: int = option(0, "steps between checkpoints; 0: none", parse=non_negative_int)
    runs: str = option("runs", "folder of the run folders", metavar="FOLDER")
    name: str | None = option(None, "name of this run (default: date and time)", parse=str)

    def chosen_device(self) -> str:
        """ "cpu" or "cuda"."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


def build_config(options: TrainOptions, ranks: int, vocab: int) -> ModelConfig:
    """The model's shape. Raises: UserError for whatever does not fit together, before any rank starts."""
    sharing = options.expert_ranks or ranks
    if ranks % sharing:
        raise UserError(
            "expert-ranks",
            got=sharing,
            expected=f"a divisor of the {ranks} ranks",
            do="change --expert-ranks or --ranks",
        )
    gate = parse_gate(options.gate)
    top_k = options.top_k or (2 if gate.name == "gshard" else 1)
    config = model_config(
        options.model,
        vocab=vocab,
        num_experts=options.experts or 2 * sharing,
        top_k=top_k,
        gate=str(gate),
        capacity_factor=options.capacity_factor,
        dropout=options.dropout,
        # What no dropout uses must not keep a run from being resumed.
        dropout_seed=options.seed if options.dropout else 0,
    )
    if options.sequence is not None and options.sequence > config.sequence:
        raise UserError(
            "sequence",
            got=options.sequence,
            expected=f"at most {config.sequence}",
            do=f"{config.name} has no more",
        )
    if config.num_experts % sharing:
        raise UserError(
            "experts",
            got=config.num_experts,
            expected=f"a multiple of the {sharing} ranks that share them",
            do="change --experts, --expert-ranks or --ranks",
        )
    gate.check(config.num_experts, top_k)
    gate.check_capacity_factor(config.capacity_factor)
    return config


def build_groups(rank: Rank, expert_ranks: int | None) -> Groups:
    """Consecutive ranks, `expert_ranks` of them (None: all), share one set of experts. Collective."""
    if rank.world == 1:
        return Groups()
    sharing = expert_ranks or rank.world
    mesh = init_device_mesh(
        rank.device.type, (rank.world // sharing, sharing), mesh_dim_names=("replica", "expert")
    )
    return Groups.from_mesh(mesh, expert="expert", replica="replica")


def check_fused(options: TrainOptions) -> None:
    """Raise UserError if this run cannot have fused launches, before a rank starts."""
    # Only here: the kernels need Triton, which not every machine has.
    from lancet_kernels.fused_step import FusedChoice

    FusedChoice(options.strategy, None, "auto", None, torch.device(options.chosen_device()))


def check_options(options: TrainOptions, ranks: int) -> None:
    """Everything that can be known to be wrong before a rank starts. Raises: UserError."""
    build_config(options, ranks, vocab=256)
    for what, path in (("data", options.data), ("tokenizer", options.tokenizer)):
        if path is not None and not Path(path).exists():
            raise UserError(what, got=path, expected="an existing path", do=f"check --{what}")
    if options.plan is not None and (options.strategy == "none" or not Path(options.plan).is_file()):
        raise UserError(
            "plan",
            got=f"{options.plan} with strategy {options.strategy}",
            expected="a plan file, and another strategy than none",
            do="check --plan and --strategy",
        )
    if options.backend == "fused":
        check_fused(options)
    if options.compare and (options.chosen_device() == "cuda" or ranks == 1 or options.strategy == "none"):
        raise UserError(
            "compare",
            got=f"{ranks} rank(s) on {options.chosen_device()} with strategy {options.strategy}",
            expected="at least 2 CPU ranks and another strategy than none",
            do="leave --compare out",
        )
    if options.link_gbps is not None and options.chosen_device() == "cuda":
        raise UserError(
            "link-gbps", got="device cuda", expected="cpu", do="only CPU ranks can share an emulated link"
        )


def build_optimizer(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum; the rate is set anew in every step."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=0.0, momentum=options.momentum, weight_decay=options.weight_decay
        )
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=options.weight_decay)


def learning_rate(options: TrainOptions, step: int) -> float:
    """Linear warmup to the peak, then constant. Steps count from 1."""
    peak = options.lr or _RATES[options.optimizer]
    return peak * min(1.0, step / options.warmup) if options.warmup else peak


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, options: TrainOptions, rank: Rank, corpus: Corpus) -> None:
        self.options, self.rank, self.corpus = options, rank, corpus
        config = build_config(options, rank.world, corpus.vocab_size)
        self.sequence = options.sequence or config.sequence
        for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
            check_length(tokens, self.sequence, part)
        torch.manual_seed(options.seed)
        self.groups = build_groups(rank, options.expert_ranks)
        self.model = GPT2MoE(config, self.groups).to(rank.device)
        self.optimizer = build_optimizer(options, self.model)
        self.buckets = None
        broadcast_replicated(self.model, self.groups)
        self.module: nn.Module = TrainingStep(
            self.model,
            rank.world,
            options.balance_weight,
            options.z_weight,
            torch.bfloat16 if rank.device.type == "cuda" else None,
        )
        self.about = {
            **{k: v for k, v in asdict(config).items() if k != "name"},
            "model": config.name,
            "optimizer": options.optimizer,
        }
        name_layers(self.module)
        emulate_link(options.link_gbps if rank.world > 1 else None)

    def plan(self, cache: Path) -> None:
        """Train with the plan of the chosen strategy from here on; "none" trains as the module stands.

        Args: cache: where the plan is kept, so that a resumed run adds its numbers in the same order.
        """
        if self.options.strategy != "none":
            # Here, not above: the solver and torch's tracer take a second to import.
            from lancet_kernels.optimization import optimize
            from lancet_kernels.schedules.strategies import PlanningOptions

            self.module = optimize(
                self.module,
                self.batch(1),
                strategy=self.options.strategy,
                cache=cache,
                options=PlanningOptions(self.options.partition()),
                plan=self.options.plan,
                reduce_gradients=self.rank.world > 1,
                backend=self.options.backend,
            )
        elif self.rank.world > 1:
            self.buckets = GradientBuckets(self.model, self.groups)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step on this rank, [B, S] int64 each."""
        tokens = training_batch(
            self.corpus.train,
            seed=self.options.seed,
            step=step,
            global_batch=self.options.batch * self.rank.world,
            sequence=self.sequence,
            rank=self.rank.rank,
            ranks=self.rank.world,
        )
        return tuple(t.to(self.rank.device) for t in tokens)

    def step(self, step: int) -> dict[str, float]:
        """One training step (they count from 1). Returns its metrics, the same on every rank."""
        options, rank = self.options, self.rank
        begin = time.perf_counter()
        link.read()
        tokens = self.batch(step)
        set_routing_step(self.model, step)
        result = self.module(*tokens)
        result.objective.backward()
        if self.buckets is not None:
            self.buckets.finish()
        norm = clip_gradients(self.model, options.clip, self.groups)
        rate = learning_rate(options, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for layer, assigned_E in zip(moe_layers(self.model), result.assigned, strict=True):
            if layer.correction_bias is not None:
                layer.update_correction_bias(assigned_E, options.bias_rate)
        traffic = link.read()
        mean = self._mean_over_ranks(
            [result.loss, result.balance, result.dropped, traffic.all_to_all_ms, traffic.exposed_ms]
        )
        seconds = time.perf_counter() - begin
        return {
            "step": step,
            "loss": mean[0],
            "balance_loss": mean[1],
            "dropped": mean[2],
            "all_to_all_ms": mean[3],
            "exposed_ms": mean[4],
            "gradient_norm": float(norm),
            "learning_rate": rate,
            "step_ms": seconds * 1e3,
            "tokens_per_s": options.batch * rank.world * self.sequence / seconds,
        }

    def _mean_over_ranks(self, values: list[Tensor | float]) -> list[float]:
        numbers = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.rank.device)
        if self.groups.data:
            with waiting("mean of the step's figures over the ranks", group_of(self.groups.data)):
                dist.all_reduce(numbers, group=group_of(self.groups.data))
        return (numbers / self.rank.world).tolist()

    def compare(self, picture: Path) -> dict[str, object]:
        """Blocking iterations against planned ones on an emulated link, interleaved; see `overlap`.

        The link is the one of the run, or one on which all-to-all takes 40 % of a blocking iteration.
        """
        # Here, not above: the solver and torch's tracer take a second to import.
        from lancet_kernels.measuring import overlap_bench as overlap
        from lancet_kernels.schedules.strategies import PlanningOptions

        step, inputs = getattr(self.module, "module", self.module), self.batch(1)
        gbps = self.options.link_gbps or overlap.slow_link(step, inputs)
        options = PlanningOptions(self.options.partition())
        modules = overlap.prepare(
            step, inputs, dict.fromkeys(("none", self.options.strategy)), options=options
        )
        measured = overlap.measure(modules, inputs, self.options.compare)
        overlap.save_timeline(modules[self.options.strategy], inputs, picture, self.rank.rank == 0)
        return {
            "link": "emulated",
            "link_gbps": gbps,
            "iterations": self.options.compare,
            "iteration_ms": {name: m.iteration_ms for name, m in measured.items()},
            "exposed_ms": {name: m.exposed_ms for name, m in measured.items()},
            "speedup_quartiles": overlap.speedups(measured["none"], measured[self.options.strategy]),
            "timeline": str(picture),
        }

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean cross-entropy over the validation batches of all ranks."""
        batches = validation_batches(
            self.corpus.validation,
            global_batch=self.options.batch * self.rank.world,
            sequence=self.sequence,
            rank=self.rank.rank,
            ranks=self.rank.world,
            max_batches=self.options.validation_batches,
        )
        device = self.rank.device
        losses = [float(self.module(*(t.to(device) for t in tokens)).loss) for tokens in batches]
        return self._mean_over_ranks([statistics.fmean(losses)])[0]


def train(options: TrainOptions, rank: Rank, resume: str | None = None) -> dict[str, object] | None:
    """Train from the start, or from the newest checkpoint of the run `resume`, to the last step on this rank.

    Returns: the summary on rank 0, None on the others. Leaves the run's folder behind.
    """
    check_options(options, rank.world)
    trainer = Trainer(options, rank, load_corpus(options.data, options.tokenizer))
    run, path = _open_run(options, rank, resume)
    try:
        trainer.plan(path / "plan.json")
        first = _restore(trainer, path, options.steps) + 1 if resume else 1
    except BaseException:
        if run is not None and not resume:
            run.discard()
        raise
    if run is not None:
        # The run has the plan in its own folder from here on.
        run.write_config(asdict(replace(options, experts=trainer.model.config.num_experts, plan=None)))
        run.truncate_metrics(first - 1)
        run.point_latest()
    for step in _progress(first, options.steps, rank):
        metrics = trainer.step(step)
        if run is not None:
            run.append_metrics(metrics)
        if options.checkpoint_every and step % options.checkpoint_every == 0:
            checkpoint.save_checkpoint(
                path / _CHECKPOINTS, step, trainer.model, trainer.optimizer, trainer.about
            )
    validation_loss = trainer.validation_loss()
    comparison = trainer.compare(path / "timeline.png") if options.compare else None
    if run is None:
        return None
    with run:
        summary = _summary(run, trainer, validation_loss)
        if comparison is not None:
            summary["comparison"] = comparison
        run.write_summary(summary)
    return summary


def _open_run(options: TrainOptions, rank: Rank, resume: str | None) -> tuple[RunFolder | None, Path]:
    """The run's folder, held by rank 0 alone, and its path on every rank."""
    run, path = None, [None]
    if rank.rank == 0:
        if resume:
            # The ranks of a launcher that was just killed need a moment to notice.
            run = RunFolder.open(resolve_run(options.runs, resume), wait_s=5.0)
        else:
            run = RunFolder.create(options.runs, options.name)
        path = [str(run.path)]
    if rank.world > 1:
        with waiting("broadcast of the run's folder"):
            dist.broadcast_object_list(path, src=0)
    return run, Path(path[0])


def _restore(trainer: Trainer, run: Path, steps: int) -> int:
    """Load the newest whole checkpoint of a run. -> the step it was saved after."""
    found = checkpoint.find_checkpoint(run / _CHECKPOINTS)
    if found is None:
        raise UserError(
            "resume",
            got=f"{run.name}, which has no whole checkpoint",
            expected="a run with one",
            do="train with --checkpoint-every, or start anew",
        )
    step = checkpoint.load_checkpoint(found, trainer.model, trainer.optimizer, trainer.about)
    if step >= steps:
        raise UserError(
            "steps",
            got=f"{steps}, with {step} already taken",
            expected=f"more than {step}",
            do="raise --steps",
        )
    return step


def _progress(first: int, last: int, rank: Rank) -> Iterator[int]:
    """The steps, with a bar on a terminal of rank 0."""
    shown = rank.rank == 0 and sys.stderr.isatty()
    return iter(tqdm(range(first, last + 1), initial=first - 1, total=last, unit="step", disable=not shown))


def _summary(run: RunFolder, trainer: Trainer, validation_loss: float) -> dict[str, object]:
    """What the run came to. Times and rates are medians over the steps, without the first (warm-up)."""
    options, config = trainer.options, trainer.model.config
    # JSON has no word for NaN, which a diverged run has.
    metrics = [{k: math.nan if v is None else v for k, v in m.items()} for m in run.read_metrics()]
    steady = metrics[1:] or metrics

    def median(key: str) -> float:
        return statistics.median(m[key] for m in steady)

    return {
        "run": run.name,
        "model": config.name,
        "gate": config.gate,
        "experts": config.num_experts,
        "ranks": trainer.rank.world,
        "device": trainer.rank.device.type,
        "data": trainer.corpus.name,
        "steps": len(metrics),
        "loss_first": metrics[0]["loss"],
        "loss_last": metrics[-1]["loss"],
        "validation_loss": validation_loss,
        "balance_loss": median("balance_loss"),
        "dropped": statistics.fmean(m["dropped"] for m in metrics),
        "tokens_per_s": median("tokens_per_s"),
        "step_ms": median("step_ms"),
        "all_to_all_ms": median("all_to_all_ms"),
        "exposed_ms": median("exposed_ms"),
        "link": "real" if options.link_gbps is None else f"emulated, {options.link_gbps:g} Gbit/s",
    }
