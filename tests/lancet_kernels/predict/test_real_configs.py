"""Configurations of models that people train, from their published numbers (`configs/`): each is captured at
full size for 16 GPUs, or refused in one line."""

from pathlib import Path

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.predict.answer import microbatches
from lancet_kernels.predict.question import Question

pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "configs"
REFUSED = {
    "dbrx": "got DbrxForCausalLM, which cannot be converted: DbrxExperts",
}  # fmt: skip
"""What the one line says."""


NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_captured_or_refused_in_one_line(name: str) -> None:
    question = Question(str(FOLDER / f"{name}.json"), "dgx-h100", 16, 4, sequence=512)
    if name not in REFUSED:
        assert microbatches(question)[-1].program.instructions
        return
    with pytest.raises(UserError, match=REFUSED[name]) as error:
        microbatches(question)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
