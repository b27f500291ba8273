"""One rank's training: model, optimizer and data, a step, the validation loss.

B  sequences per rank and step      S  sequence length

A checkpoint, by torch.distributed.checkpoint, is a folder `step-00000040/`. Its index is written last: a
folder without one was left by a save that was killed, and counts as absent. What 2 ranks saved can be loaded
by 1 or 4, experts included. With several machines the folder must be on a file system that all of them share.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lancet_kernels.cli.train_options import Corpus, TrainOptions, batch_of_rank, build_config
from lancet_kernels.errors import UserError
from lancet_kernels.layer.gpt2_moe import GPT2MoE, TrainingStep
from lancet_kernels.layer.gradients import broadcast_replicated, clip_gradients
from lancet_kernels.layer.model_layers import moe_layers, name_layers, set_routing_step
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.layer.summed_gradients import SummedModule
from lancet_kernels.measure.launch import Rank
from lancet_kernels.ops.comm.groups import Groups, from_first_rank, group_name, over_ranks
from lancet_kernels.ops.comm.link import emulate_link, link
from lancet_kernels.ops.comm.waiting import waiting


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training changes, in tensors that share memory with the originals."""
    # Imported here and below, because it takes half a second, and most runs keep no checkpoints.
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Without its hyper-parameters, which a resumed run may change.
    return {"model": model_state, "optimizer": optimizer_state["state"]}


def save_checkpoint(
    folder: str | Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Write `folder/step-<step>` and delete all but the two newest. Collective over all ranks.

    Raises: UserError on all ranks where one of them cannot write; those before are kept.
    """
    import torch.distributed.checkpoint as dcp

    path = Path(folder, f"step-{step:08d}")
    try:
        with _one_rank_is_enough(), waiting("saving of a checkpoint"):
            dcp.save(training_state(model, optimizer), checkpoint_id=path)
    except dcp.CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise UserError(
            "checkpoint",
            got=f"{path} that rank {rank} cannot write ({reason})",
            expected="a folder with room for it",
            do="make room, and resume: the checkpoints before are complete",
        ) from error
    if not dist.is_initialized() or dist.get_rank() == 0:
        for old in _complete(folder)[:-2]:
            shutil.rmtree(old)
    return path


def find_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in `folder`; None if there is none.

    Decided on rank 0 for all ranks (collective).
    """
    complete = _complete(folder)
    return from_first_rank(complete[-1] if complete else None, group_name(None), "the choice of a checkpoint")


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load `path` (from `find_checkpoint`) into model and optimizer, in place. Collective over all ranks.

    Returns: the step after which it was saved. Raises: UserError for one of another model or optimizer.
    """
    import torch.distributed.checkpoint as dcp

    state = training_state(model, optimizer)
    try:
        with _one_rank_is_enough(), waiting("loading of a checkpoint"):
            dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        is_damaged = not str(reason).startswith(("Missing key", "Size mismatch"))
        older = [other.name for other in _complete(Path(path).parent) if other < Path(path) and is_damaged]
        raise UserError(
            "checkpoint",
            # The first sentence: torch goes on about what may corrupt a file.
            got=f"{path} ({str(reason).split('. ')[0].rstrip('.')})",
            expected="one of this model and optimizer, saved by this version",
            do=(f"move it away to resume from {older[-1]}" if older else "train anew")
            + ", or resume with what saved it",
        ) from error
    # Tensors were loaded in place; this also takes what a module copies on loading.
    model.load_state_dict(state["model"])
    return int(Path(path).name.removeprefix("step-"))


def _complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, by their steps."""
    return sorted(index.parent for index in Path(folder).glob("step-*/.metadata"))


@contextlib.contextmanager
def _one_rank_is_enough() -> Iterator[None]:
    """Suppress the warning that torch.distributed is not initialized, which is normal for a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


_RATES = {"adamw": 1e-3, "sgd": 0.1}


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, options: TrainOptions, rank: Rank, corpus: Corpus) -> None:
        self.options, self.rank, self.corpus = options, rank, corpus
        config = build_config(options, rank.world)
        self.sequence = options.sequence or config.sequence
        for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
            if len(tokens) < self.sequence + 1:
                raise UserError(
                    f"{part} data",
                    got=f"{len(tokens)} tokens",
                    expected=f"at least {self.sequence + 1} for sequences of {self.sequence}",
                    do="give more text or choose shorter sequences",
                )
        torch.manual_seed(options.seed)
        self.groups = _groups(rank, options.expert_ranks)
        self.model = GPT2MoE(config, self.groups).to(rank.device)
        self.optimizer = _optimizer(options, self.model)
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
        """Train with the plan of the chosen strategy from now on; "none" trains without a plan.

        Args: cache: the plan file, so that a resumed run has the same plan, and sums in the same order.
        """
        if self.options.strategy != "none":
            # Imported here, because torch's tracer takes a second to import.
            from lancet_kernels.optimization.optimize import optimize
            from lancet_kernels.schedules.strategies import PlanningOptions

            self.module = optimize(
                self.module,
                self.batch(1),
                strategy=self.options.strategy,
                cache=cache,
                options=PlanningOptions(self.options.partition()),
                plan=self.options.plan,
                reduce_gradients="sum" if self.rank.world > 1 else False,
                backend=self.options.backend,
            )
        elif self.rank.world > 1:
            # The objective is divided by the number of ranks already.
            self.module = SummedModule(self.module, self.groups, divide_by=1)

    def batch(self, step: int, tokens: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step on this rank, [B, S] int64 each; `tokens`: to be read from."""
        inputs, targets = batch_of_rank(
            self.corpus.train if tokens is None else tokens,
            seed=self.options.seed,
            step=step,
            batch=self.options.batch,
            sequence=self.sequence,
            rank=self.rank.rank,
        )
        return inputs.to(self.rank.device), targets.to(self.rank.device)

    def step(self, step: int, stop: bool = False) -> tuple[dict[str, float], bool]:
        """One training step (numbered from 1). Returns its metrics, the same on every rank, and whether any
        rank is to `stop` after it."""
        options, rank = self.options, self.rank
        begin = time.perf_counter()
        link.read()
        tokens = self.batch(step)
        set_routing_step(self.model, step)
        result = self.module(*tokens)
        result.objective.backward()
        norm = clip_gradients(self.model, options.clip, self.groups)
        # Linear warmup to the peak, then constant.
        rate = (options.lr or _RATES[options.optimizer]) * min(1.0, step / max(1, options.warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for layer, assigned_E in zip(moe_layers(self.model), result.assigned, strict=True):
            if isinstance(layer, MoELayer) and layer.correction_bias is not None:
                layer.update_correction_bias(assigned_E, options.bias_rate)
        traffic = link.read()
        figures = {
            "loss": result.loss,
            "balance_loss": result.balance,
            "dropped": result.dropped,
            "all_to_all_ms": traffic.all_to_all_ms,
            "exposed_ms": traffic.exposed_ms,
        }
        *means, stopping = self._mean_over_ranks([*figures.values(), stop])
        seconds = time.perf_counter() - begin
        metrics = {
            "step": step,
            **dict(zip(figures, means, strict=True)),
            "gradient_norm": float(norm),
            "learning_rate": rate,
            "step_ms": seconds * 1e3,
            "tokens_per_s": options.batch * rank.world * self.sequence / seconds,
        }
        return metrics, stopping > 0

    def _mean_over_ranks(self, values: list[Tensor | float]) -> list[float]:
        own = torch.tensor([float(v) for v in values], dtype=torch.float64)
        what = "mean of the step's figures over the ranks"
        return over_ranks(own, self.groups.data, "mean", what).tolist()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean cross-entropy over the validation batches of all ranks."""
        batches = [self.batch(i, self.corpus.validation) for i in range(self.options.validation_batches)]
        losses = [float(self.module(*tokens).loss) for tokens in batches]
        return self._mean_over_ranks([statistics.fmean(losses)])[0]


def _groups(rank: Rank, expert_ranks: int | None) -> Groups:
    """Consecutive ranks, `expert_ranks` of them (None: all), share one set of experts. Collective."""
    if rank.world == 1:
        return Groups()
    sharing = expert_ranks or rank.world
    shape = rank.world // sharing, sharing
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("replica", "expert"))
    return Groups.from_mesh(mesh, expert="expert", replica="replica")


def _optimizer(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Every step sets the learning rate."""
    common: dict[str, Any] = {"params": model.parameters(), "lr": 0.0, "weight_decay": options.weight_decay}
    if options.optimizer == "sgd":
        return torch.optim.SGD(**common, momentum=options.momentum)
    return torch.optim.AdamW(**common, betas=(0.9, 0.95))
