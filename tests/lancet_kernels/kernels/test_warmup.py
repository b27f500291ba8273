"""What preparing exchanges does on a machine without a GPU; `test_launch_on_stub.py` has what compiles."""

import pytest

from lancet_kernels.kernels import overlap, runtime
from lancet_kernels.kernels.symmetric import virtual_memories
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import check_same, make_layer


@pytest.mark.long
@pytest.mark.skipif(not runtime.INTERPRETED, reason="what is noted is launched here in the interpreter")
def test_exchanges_are_prepared_by_a_pass_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    case, noted = Case(world=1), []
    plain, prepared = (make_layer(virtual_memories(1)[0], "layer", case) for _ in range(2))
    given = prepared.x, prepared.routing, prepared.experts, prepared.config
    overlap.warm_up(prepared.forward, prepared.backward, *given)
    assert prepared.forward.begun == 0
    with monkeypatch.context() as compiled:
        compiled.setattr(runtime, "INTERPRETED", False)
        compiled.setattr(runtime, "check_runs_on", lambda what, device: None)
        compiled.setattr(overlap, "compile_together", noted.extend)
        overlap.warm_up(prepared.forward, prepared.backward, *given)
    names = [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in noted]
    assert names == [
        "exchange_counts",
        "schedule",
        "overlap",
        "combine_results",
        "overlap",
        "combine_results",
    ]
    assert not prepared.forward.arrived.local.any()
    assert (prepared.forward.begun, prepared.backward.begun) == (1, 1)
    # Its bank is free: passes go on, and give what they give without it.
    for _ in range(3):
        check_same(prepared.run(), plain.run(), "prepared")
    prepared.check()
