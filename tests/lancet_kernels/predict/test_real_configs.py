"""Configurations of models that people train, from their published numbers (`configs/`): each is captured at
full size for 16 GPUs, or refused in a line."""

from pathlib import Path

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.predict.answer import microbatches
from lancet_kernels.predict.question import Question

pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "configs"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


REFUSED = {
    "jamba-mini": "--hf: got JambaMambaMixer, computed token by token, with --sequence 512, expected at"
}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_captured(name: str) -> None:
    question = Question(str(FOLDER / f"{name}.json"), "dgx-h100", 16, 4, sequence=512)
    if name in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name]):
            microbatches(question)
    else:
        assert microbatches(question)[-1].program.instructions
