"""What a rehearsal does on a machine without a GPU: it compiles and loads, and runs nothing."""

import json
from pathlib import Path

import pytest
import torch

from lancet_kernels.kernels import rehearsal, runtime
from lancet_kernels.symmetric import virtual_memories
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import check_same, make_layer
from tests.processes import printed


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_virtual_pes.py rehearses for the GPU that is here"
)
def test_every_kernel_of_a_pass_is_compiled_once_and_loaded(tmp_path: Path) -> None:
    # An empty cache, so that everything is compiled anew.
    program = "tests.lancet_kernels.kernels.rehearse_without_gpu"
    said = printed("-m", program, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    found = json.loads(said.splitlines()[-1])
    # Seven of a pass, forward, backward and release, of two PEs, twice: all PEs share the kernels.
    counting = ["exchange_counts_kernel", "release_kernel", "schedule_kernel"]
    assert found["kernels"] == sorted(["combine_results_kernel", "overlap_kernel"] * 2 + counting)
    assert len(found["launches"]) == 28
    assert not found["sent"]
    assert found["epochs"] == [2, 2]


def test_later_passes_and_other_layers_compile_nothing() -> None:
    said = printed(
        "-m", "tests.lancet_kernels.kernels.rehearse_without_gpu", "variants", TRITON_INTERPRET="0"
    )
    found = json.loads(said.splitlines()[-1])
    # Overlap and combine of both directions; counts, schedule and release.
    assert len(found["first"]) == 7
    assert found["later"] == found["first"]


@pytest.mark.long
@pytest.mark.skipif(not runtime.INTERPRETED, reason="what is noted is launched here in the interpreter")
def test_exchanges_are_prepared_by_a_pass_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    case, noted = Case(world=1), []
    plain, prepared = (make_layer(virtual_memories(1)[0], "layer", case) for _ in range(2))
    given = prepared.x, prepared.routing, prepared.experts, prepared.config
    rehearsal.prepare(prepared.forward, prepared.backward, *given)
    assert prepared.forward.begun == 0
    with monkeypatch.context() as compiled:
        compiled.setattr(runtime, "INTERPRETED", False)
        compiled.setattr(runtime, "check_device", lambda what, tensor: None)
        compiled.setattr(rehearsal, "compile_together", noted.extend)
        rehearsal.prepare(prepared.forward, prepared.backward, *given)
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
