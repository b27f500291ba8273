"""Parameters that several ranks hold, compared now and then."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lancet_kernels import Groups, MoELayer, UserError
from lancet_kernels.layer import gradients
from lancet_kernels.layer.gradients import Replicas, digest
from tests.grids import few_of
from tests.ops.op_cases import QUICK
from tests.optimized import optimized

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@given(st.data())
@QUICK
def test_a_digest_changes_with_every_element(data) -> None:
    dtype, size = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tensor = torch.randn(size, generator=generator).to(dtype)
    other = tensor.clone()
    bits = other.view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != digest(other)
    assert digest(tensor) == digest(tensor.clone())


def test_a_digest_sees_what_cancels_in_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element that grew by the last bit, one that shrank by it; and of any layout, in pieces or not."""
    tensor = torch.linspace(1.0, 2.0, 12)
    other = tensor.clone()
    other.view(torch.int32)[:2] += torch.tensor([1, -1], dtype=torch.int32)
    assert digest(tensor) != digest(other)
    turned = tensor.view(3, 4).T.contiguous().T
    monkeypatch.setitem(gradients._PIECE, "cpu", 5)
    assert digest(turned) == digest(tensor)
    assert digest(torch.empty(0)) == 0


class Step(nn.Module):
    def __init__(self, groups: Groups | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = nn.Linear(4, 4)
        self.layer = MoELayer(4, 6, 4, top_k=2, gate="topk", capacity_factor=None, groups=groups)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        with torch.no_grad():
            self.layer.w1 *= 50
            self.layer.w2 *= 50

    def forward(self, x):
        return self.layer(self.input(x) * self.frozen.sum()).square().sum() / dist.get_world_size()


def drift_on_rank(name: str, every: int) -> list[str]:
    """What four ranks, of which two share experts, say of a parameter that one of them changes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    model = Step(Groups.from_mesh(mesh, expert="expert", replica="replica"))
    step = optimized(model, (torch.randn(2, 4),), "none", compare_every=every)
    said = []
    for number in range(7):
        try:
            step(torch.randn(2, 4)).backward()
        except UserError as error:
            return [*said, str(error)]
        said.append("")
        if number == 1 and dist.get_rank() == 3:
            model.get_parameter(name).data.view(-1)[-1] *= 1.0001
    return said


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "every"), few_of([("layer.w1", 2), ("input.bias", 1), ("frozen", 3), ("layer.w1", 0)])
)
def test_a_parameter_that_differs_is_named_on_all_ranks(pool, name: str, every: int) -> None:
    """In the call behind the comparison, which is the one behind the change or a later one."""
    by_rank = pool.run(drift_on_rank, name, every, ranks=4)
    assert all(said == by_rank[0] for said in by_rank)
    calls = {0: None, 1: 3, 2: 4, 3: 3}[every]
    assert by_rank[0][:calls] == [""] * (calls or 7)
    if every:
        (message,) = by_rank[0][calls:]
        assert message.startswith(f"parameter {name} after {calls} calls of the optimized module: ")
        assert "another value on rank(s) 3, expected" in message
        assert "\n" not in message


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_a_number_of_calls_that_is_none(every: object) -> None:
    with pytest.raises(UserError, match=r"compare_every: got .*, expected a number of calls, 0 or more"):
        optimized(nn.Linear(2, 2), (torch.zeros(1, 2),), "none", compare_every=every)


def test_one_rank_has_nothing_to_compare() -> None:
    watch = Replicas(Step(), Groups(), 1)
    for _ in range(3):
        watch.call()
