"""`python -m bench.papers hidup`: links like the authors' measurements, baselines, claims that can fail."""

import json

import pytest

from bench.papers import hidup, report
from bench.papers.hidup_settings import HiDupSetting, WholeBatch, hidup_config, links, with_bandwidth
from lancet_kernels.graph.costs.clusters import load_cluster
from tests.grids import few_of

# (machines, GPUs in each, Gbit/s, 10^9 bytes of the whole tensor a second): measured by the paper's authors.
MEASURED = (
    (8, 8, 9.71, {"all_gather": 1.22, "all_reduce": 0.612, "reduce_scatter": 1.13, "all_to_all": 10.7}),
    (8, 1, 9.71, {"all_gather": 1.21, "all_reduce": 0.596, "reduce_scatter": 1.29, "all_to_all": 9.35}),
    (2, 4, 100, {"all_gather": 9.95, "all_reduce": 9.21, "reduce_scatter": 10.6, "all_to_all": 32.3}),
    (1, 4, 9.71, {"all_gather": 43.0, "all_reduce": 38.9, "reduce_scatter": 50.6, "all_to_all": 111.0}),
)


@pytest.mark.parametrize(("machines", "inside", "gbit", "rates"), MEASURED)
def test_links_are_near_what_was_measured(machines, inside, gbit, rates):
    gpus = machines * inside
    model = links(with_bandwidth(load_cluster("hidup-v100"), gbit, inside), gpus)
    for name, measured in rates.items():
        size = 1e9 / (gpus if name == "all_to_all" else 1)
        rate = 1e3 / model.milliseconds(name, size)
        assert rate == pytest.approx(measured, rel=0.2), name
    whole = model.milliseconds("reduce_scatter", 1e9) + model.milliseconds("all_gather", 1e9)
    assert model.milliseconds("all_reduce", 1e9) <= whole * 1.001


@pytest.fixture(scope="module")
def setting() -> HiDupSetting:
    return HiDupSetting("bert-switch", 8, 2, 30, layers=2)


@pytest.mark.long
def test_baselines_do_what_they_are_named_after(setting):
    strategy = setting.expert_parallel
    messages = [c for stage in strategy.stages for c in stage.communication]
    activations = [c for c in messages if c.tensor not in strategy.parameters]
    assert [c.collective for c in activations] == ["all_to_all"] * 2
    times = WholeBatch.of(strategy, overlaps_gradients=False)
    assert times.wall_ms == pytest.approx(times.computation_ms + times.communication_ms)
    # One all-reduce of everything but the experts, four all-to-alls of a rank's [B, E, C, M].
    config = hidup_config("bert-switch", 8, 2)
    moved = 32 * config.experts * config.capacity * config.width * 4
    gradients = sum(
        setting.cost.communication.milliseconds("all_reduce", 4 * size)
        for t, form in strategy.parameters.items()
        if not form.is_cut
        for size in (setting.whole_batch.tensors[t].content_bytes / 4,)
    )
    exchanged = 4 * setting.cost.communication.milliseconds("all_to_all", moved)
    assert times.communication_ms == pytest.approx(gradients + exchanged)
    overlapped = WholeBatch.of(strategy, overlaps_gradients=True)
    assert times.wall_ms - overlapped.wall_ms == pytest.approx(overlapped.hidden_ms)


@pytest.mark.parametrize("figures", few_of(("11,table 4", "7,8")))
@pytest.mark.long
def test_small_models(figures, tmp_path):
    numbers = figures.split(",")
    data = hidup.simulate(numbers, report.one_by_one, layers=2)
    assert list(data["figures"]) == numbers
    claims = report.claims(hidup, data)
    assert claims
    assert all(set(c) >= {"name", "paper", "ours", "holds"} for c in claims)
    json.dumps(report.as_json(hidup, data, {}))
    report.save_pictures(hidup, "hidup", data, tmp_path)
    for row in data["figures"].get("8", ()):
        assert row["hidup_ms"] <= min(row["baselines_ms"].values())
