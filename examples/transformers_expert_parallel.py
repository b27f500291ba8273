"""`transformers.Trainer` with transformers' own FSDP and expert parallelism, on the ops of this library.

    torchrun --nproc-per-node 2 examples/transformers_expert_parallel.py runs/ep     # again: it goes on
    torchrun --nproc-per-node 4 examples/transformers_expert_parallel.py runs/ep     # experts in shards, too
    torchrun --nproc-per-node 2 examples/transformers_expert_parallel.py runs/ep --accumulate 4 --plan

The import that registers `ep_implementation="lancet"` and the `DistributedConfig` are the only differences
from a model on one device, but for checkpoints: the Trainer (transformers 5.23) saves no optimizer of a model
that was sharded when it was loaded. `Checkpoints` does, as `own_loop.py`.

With a plan, `PlannedTrainer` gives all microbatches of an optimizer step to the plan at once, and the
backward of each runs together with the forward of the next. Parameters, optimizer and checkpoints are the
same, so a run may resume with a plan or without.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from own_loop import load, save
from transformers import (
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

import lancet_kernels.transformers.expert_parallel  # noqa: F401  registers "lancet"
from lancet_kernels import CausalLMStep, OptimizedModule, optimize

EXPERT_RANKS = 2
BATCH = 8

CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
    pad_token_id=0, eos_token_id=None,
)  # fmt: skip


def sequence(number: int) -> dict[str, torch.Tensor]:
    """Tokens that count upwards."""
    ids = (7 * number + torch.arange(16)) % CONFIG.vocab_size
    return {"input_ids": ids, "labels": ids}


class Checkpoints(TrainerCallback):
    """Saves model and optimizer at the end, and loads the newest checkpoint, on any number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, latest = folder, folder / "latest"
        self.first_step = int(latest.read_text()) if latest.exists() else 0

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **others) -> None:
        load(self.folder, model, optimizer.optimizer)  # accelerate wraps it

    def on_train_end(self, args, state, control, model=None, optimizer=None, **others) -> None:
        save(self.folder, self.first_step + state.global_step, model, optimizer.optimizer)


class PlannedTrainer(Trainer):
    """Trainer that runs the microbatches of an optimizer step by one plan, made for the first of them."""

    planned: OptimizedModule | None = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        """-> the mean of the losses with the last microbatch, 0 before it; the Trainer logs their sum."""
        model.train()
        inputs, accumulate = self._prepare_inputs(inputs), self.args.gradient_accumulation_steps
        inputs["num_items_in_batch"] = num_items_in_batch / accumulate
        if self.planned is None:
            strategy = "microbatches" if accumulate > 1 else "lancet-dw"
            self.planned = optimize(CausalLMStep(model), inputs, strategy=strategy, accumulate=accumulate)
            self.waiting = []
        self.waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        losses = self.planned.microbatches(self.waiting)
        self.waiting = []
        return torch.stack(losses).mean()


def main(folder: Path, steps: int, accumulate: int, plan: bool) -> list[float]:
    """Train `steps` more steps. -> their losses.

    Args: folder: the same on all ranks. accumulate: microbatches of a step.
    """
    checkpoints = Checkpoints(folder)
    arguments = TrainingArguments(
        str(folder / "logs"), max_steps=steps, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate, learning_rate=1e-2, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", use_cpu=True,
        save_strategy="no", logging_steps=1, report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    assert arguments.device.type == "cpu"  # the property starts the process group
    ranks = dist.get_world_size()
    if dist.get_rank() == 0 and not (folder / "model").exists():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(CONFIG).save_pretrained(folder / "model")
    dist.barrier()
    config = DistributedConfig(fsdp_size=ranks, ep_size=EXPERT_RANKS, ep_implementation="lancet")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=config)
    first = checkpoints.first_step * accumulate * BATCH * ranks
    data = [sequence(number) for number in range(first, first + 1000)]
    trainer_class = PlannedTrainer if plan else Trainer
    trainer = trainer_class(model, arguments, train_dataset=data, callbacks=[checkpoints])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} behind step {checkpoints.first_step + steps}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--plan", action="store_true")
    main(**vars(parser.parse_args()))
