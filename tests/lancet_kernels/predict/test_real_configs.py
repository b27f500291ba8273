"""Configurations of models that people train, from their published numbers (`configs/`): each is captured at
full width for 16 GPUs, as many layers as have all kinds."""

from pathlib import Path

import pytest

from lancet_kernels.predict.answer import depths_of
from lancet_kernels.predict.microbatch import Microbatch
from lancet_kernels.predict.model_step import model_step
from lancet_kernels.predict.question import Question

pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "configs"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_captured(name: str) -> None:
    question = Question(str(FOLDER / f"{name}.json"), "dgx-h100", 16, 4, sequence=512)
    step = model_step(question, depths_of(question.hf).fewer)
    assert Microbatch.of(question, step).program.instructions
