"""`transformers.Trainer` with a converted model: the Trainer wraps it in DistributedDataParallel by itself.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py         # nothing is planned
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --plan  # all-to-alls are

Three things differ from a dense model, and each has its line here:

- `prepare_data_parallel`: DistributedDataParallel leaves each rank its own experts.
- `max_grad_norm=0` and `ClipGradients`: the Trainer would clip by a norm that differs from rank to rank.
- `save_strategy="no"` and `export_state_dict`: the Trainer would save only the experts of rank 0.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from hugging_face import CONFIG
from torch import nn
from transformers import OlmoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lancet_kernels import (
    CausalLMStep,
    Groups,
    clip_gradients,
    convert,
    export_state_dict,
    optimize,
    prepare_data_parallel,
)

STEPS = 20


def sequence(number: int) -> dict[str, torch.Tensor]:
    """Tokens that count upwards."""
    ids = (7 * number + torch.arange(16)) % CONFIG.vocab_size
    return {"input_ids": ids, "labels": ids}


class ClipGradients(TrainerCallback):
    def __init__(self, groups: Groups, largest_norm: float) -> None:
        self.groups, self.largest_norm = groups, largest_norm

    def on_pre_optimizer_step(self, args, state, control, model=None, **others) -> None:
        clip_gradients(model, self.largest_norm, self.groups)


class PlannedTrainer(Trainer):
    """Trainer of a module that returns the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)


def main(plan: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=8, learning_rate=1e-2, use_cpu=True,
            max_grad_norm=0, save_strategy="no", logging_steps=1, report_to=[], disable_tqdm=True,
            ddp_find_unused_parameters=False, remove_unused_columns=False,
        )  # fmt: skip
        assert arguments.device.type == "cpu"  # the property starts the process group
        torch.manual_seed(0)
        model = OlmoeForCausalLM(CONFIG)
        convert(model)
        trained: nn.Module = model
        data, trainer_class = [sequence(number) for number in range(1000)], Trainer
        if plan:
            batch = torch.utils.data.default_collate(data[:8])
            trained = optimize(CausalLMStep(model), batch, reduce_gradients=False)
            trainer_class = PlannedTrainer
        groups = prepare_data_parallel(trained)
        clip = ClipGradients(groups, 1.0)
        trainer = trainer_class(trained, arguments, train_dataset=data, callbacks=[clip])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    state = export_state_dict(model)  # on every rank
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {len(state)} tensors to save")
    return losses


if __name__ == "__main__":
    main("--plan" in sys.argv)
