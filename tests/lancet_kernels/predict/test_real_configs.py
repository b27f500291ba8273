"""Configurations of models that people train, from their published numbers (`configs/`): each is captured at
full size for 16 GPUs."""

from pathlib import Path

import pytest

from lancet_kernels.predict.answer import microbatches
from lancet_kernels.predict.question import Question

pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "configs"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_captured(name: str) -> None:
    question = Question(str(FOLDER / f"{name}.json"), "dgx-h100", 16, 4, sequence=512)
    assert microbatches(question)[-1].program.instructions
