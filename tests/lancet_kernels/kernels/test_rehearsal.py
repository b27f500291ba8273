"""What a rehearsal does on a machine without a GPU: it compiles and loads, and runs nothing."""

from pathlib import Path

import pytest
import torch

from tests.rehearsals import rehearse


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_virtual_pes.py rehearses for the GPU that is here"
)
def test_every_kernel_of_a_pass_is_compiled_once_and_loaded(tmp_path: Path) -> None:
    found = rehearse(Path(__file__).with_name("rehearse_without_gpu.py"), tmp_path)
    # Forward, backward, and two releases, of two PEs, twice: all PEs share the kernels.
    counting = ["exchange_counts_kernel", "release_kernel", "schedule_kernel"]
    assert found["kernels"] == sorted(["combine_results_kernel", "overlap_kernel"] * 2 + counting)
    assert len(found["launches"]) == 32
    assert not found["sent"]
    assert found["epochs"] == [2, 2]
