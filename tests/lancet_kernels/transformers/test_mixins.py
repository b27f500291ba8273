"""transformers' own tests of expert parallelism, with ours in place of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.lancet_kernels.transformers import mixins
from tests.lancet_kernels.transformers.all_families import RESULTS
from tests.lancet_kernels.transformers.test_families import FEW
from tests.ranks import RankPool

pytest.importorskip("transformers.distributed.expert_parallel")
pytest.importorskip("parameterized")
if not (Path(mixins.FOLDER) / "test_expert_parallel_mixin.py").exists():
    pytest.skip(
        f"LANCET_TRANSFORMERS_TESTS={mixins.FOLDER!r} has no tests of transformers: make build/transformers "
        "downloads its source distribution",
        allow_module_level=True,
    )

SLOW = {"inkling2", "nemotron_h"}
"""A minute or more for one of the tests."""
BACKWARD = "test_ep_backward_1_grouped_mm"
"""Loss and all gradients, of each kind of experts."""
FINE = ("2d_vs_ddp", "bf16_grads", "grad_accumulation")
"""20 steps of Adam, or bfloat16: another CPU, whose sums are in another order, may cross their bounds."""
OTHERS = ("test_ep_backward_0_eager", "test_ep_forward_4", *FINE)
"""What no kind of experts changes, of one family: forwards eager and not, tied embeddings, FSDP."""
CASES = [(family, BACKWARD) for family in sorted({*mixins.tested_families()} & FEW - SLOW)]
CASES += [("mixtral", name) for name in mixins.test_names() if any(part in name for part in OTHERS)]
SAVED = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def many() -> Iterator[RankPool]:
    pool = RankPool(mixins.RANKS)
    yield pool
    pool.close()


@pytest.mark.long
@pytest.mark.skipif(
    version("transformers") != SAVED["transformers"], reason="the table is of another version"
)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_theirs_with_ours(many: RankPool, family: str, name: str) -> None:
    """What fails is what the table says, and nothing else does. `python -m
    tests.lancet_kernels.transformers.mixins` runs them in all families."""
    known = SAVED["families"][family]["mixins"]["lancet"]["failed"].get(name, "")
    if "exit code -9" in known:
        pytest.skip("a rank needs more than 20 GB, with their implementation as well")
    line = mixins.failure(many, family, name)
    if any(part in name for part in FINE) and "mismatch" in (line or known):
        return
    assert bool(line) == bool(known), line or f"passes, where the table has: {known}"
