"""The callback of transformers' Trainer that counts routing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from lancet_kernels import UserError, convert
from lancet_kernels.transformers.count_routing import CountRouting
from tests.transformers_models import tiny_model


def test_every_second_step_is_counted(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = tiny_model("OLMoE", torch.float32)
    convert(model)
    ids = torch.randint(0, model.config.vocab_size, (8, 6))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2,
    )  # fmt: skip
    callback = CountRouting(tmp_path / "counts.json", every=2)
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assigned = json.loads((tmp_path / "counts.json").read_text())["assigned"]
    config = model.config
    assert len(assigned) == config.num_hidden_layers
    assert {len(layer) for layer in assigned} == {config.num_experts}
    # Two steps of two microbatches with 2 x 6 tokens.
    assert {sum(layer) for layer in assigned} == {2 * 2 * 12 * config.num_experts_per_tok}


def test_a_number_of_steps_that_is_none_is_one_line() -> None:
    with pytest.raises(UserError, match="every: got 0"):
        CountRouting("counts.json", every=0)
