"""Where kernel tests run: on the CPU in Triton's interpreter, and with `-m gpu` compiled on a GPU."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU if kernels are interpreted here, a GPU if they are compiled; the other one is skipped."""
    from lancet_kernels.kernels.runtime import INTERPRETED

    if (request.param == "cpu") != INTERPRETED:
        pytest.skip("kernels are interpreted here" if INTERPRETED else "kernels are compiled here")
    return torch.device(request.param)
