"""One rank of a simulated job: process groups that send nothing, tensors without contents.

With them a training step can be captured for any number of ranks, also for models larger than this machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lancet_kernels.errors import UserError


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `ranks` ranks whose collectives do nothing. One rank has no group.

    Raises: UserError where this process is already a rank of a job.
    """
    if dist.is_available() and dist.is_initialized():
        raise UserError(
            "process group",
            got=f"a job of {dist.get_world_size()} ranks that this process belongs to",
            expected="a process outside of any job, because planning simulates ranks",
            do="plan outside of the job, without init_process_group",
        )
    if ranks == 1:
        yield
        return
    # Imported here, because importing it registers the backend.
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Without options the backend has no timeout, which new groups take over from it.
    options = FakeProcessGroup.Options()  # type: ignore[call-arg]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore(), pg_options=options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_contents() -> FakeTensorMode:
    """A context in which new tensors have shapes and no memory; real ones may be read there."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # What it remembers are weak references, with which torch refuses `module.to(dtype)`.
    mode.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
    return mode
