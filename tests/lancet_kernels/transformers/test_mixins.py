"""transformers' own tests of expert parallelism, with ours in place of theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lancet_kernels.transformers import mixins
from tests.ranks import RankPool

pytest.importorskip("transformers.distributed.expert_parallel")
pytest.importorskip("parameterized")
if not mixins.FOLDER:
    pytest.skip("LANCET_TRANSFORMERS_TESTS is not set", allow_module_level=True)


@pytest.fixture(scope="module")
def many() -> Iterator[RankPool]:
    pool = RankPool(mixins.RANKS)
    yield pool
    pool.close()


@pytest.mark.long
@pytest.mark.parametrize("name", mixins.test_names())
@pytest.mark.parametrize("family", mixins.tested_families())
def test_theirs_with_ours(many: RankPool, family: str, name: str) -> None:
    mixins.run(many, family, name)
