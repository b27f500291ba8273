"""`python -m bench.papers hidup`: links like the authors' measurements, baselines, claims that can fail."""

import json

import pytest

from bench.papers import hidup, report
from bench.papers.hidup_links import links, with_bandwidth
from bench.papers.hidup_models import hidup_config
from bench.papers.hidup_settings import HiDupSetting, NoisyCost, WholeBatch, repriced
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


def test_no_noise_changes_nothing_and_noise_is_bounded(setting):
    program, cost = setting.whole_batch, setting.cost
    quiet, noisy = NoisyCost(cost), NoisyCost(cost, 0.2, 0.5)
    for instruction, marked in zip(program.instructions, noisy.marked(program).instructions, strict=True):
        right = cost(instruction, program.tensors)
        assert quiet(instruction, program.tensors) == right
        assert abs(noisy(marked, program.tensors) - right) <= 0.2 * right + 1e-12
    factors = {i.attributes["factor"] for i in noisy.marked(program).instructions}
    assert len(factors) == len(program)


@pytest.mark.long
def test_a_strategy_at_other_costs(setting):
    strategy, program, cost = setting.hidup, setting.program, setting.cost
    again = repriced(strategy, program, cost)
    assert again.predicted_ms == pytest.approx(strategy.predicted_ms)
    assert [s.computation for s in again.stages] == [s.computation for s in strategy.stages]

    def half_as_fast(instruction, tensors):
        return 2 * cost(instruction, tensors)

    twice = repriced(strategy, program, half_as_fast).predicted_ms
    assert twice == pytest.approx(2 * strategy.predicted_ms)


def rows(**changes: float) -> dict:
    """Figures in which all claims about speedups hold."""
    row = {
        "model": "bert-sgmoe",
        "gpus": 16,
        "machines": 8,
        "gbit_per_s": None,
        "hidup_ms": 100.0,
        "lower_bound_ms": 90.0,
        "baselines_ms": {"expert parallel": 117.0},
        "speedup": 1.17,
        "overlapped": 0.9,
        "memory_gb": 5.0,
    } | changes
    bandwidths = [row | {"gbit_per_s": gbit} for gbit in (10, 30, 100)]
    figures = {
        "6": [row, row | {"model": "vit-sgmoe", "speedup": 1.5}],
        "7": [row | {"machines": 1}],
        "8": bandwidths,
        "11": [
            {
                "gbit_per_s": gbit,
                "replicated": 5,
                "sharded": 5,
                "replicated_published": 9 - n,
                "sharded_published": n,
            }
            for n, gbit in enumerate((10, 30, 100))
        ],
        "12": [
            {"gbit_per_s": 100, "layer": [], "layer_published": ["stage 0: all_to_all of x"] * 2},
            {"gbit_per_s": 10, "layer": [], "layer_published": ["stage 0: gate (whole, whole, whole)"]},
        ],
        "14": {
            "layers": [{"layers": n, "gpus": 4, "seconds": n / 2} for n in (2, 8)],
            "gpus": [{"layers": 6, "gpus": n, "seconds": 1.0} for n in (2, 8)],
        },
        "table 4": [
            {
                "setting": name,
                "system": system,
                "wall_ms": 9.0,
                "computation_ms": 8.0,
                "communication_ms": 2.0,
                "overlapped": share,
            }
            for name, share in (("one machine", 0.95), ("100 Gbit/s", 0.4), ("30 Gbit/s", 0.3))
            for system in ("hidup", "as published", "expert parallel")
        ],
        "table 5": [{"noise": n, "relative": 1.01, "most": 1.02} for n in hidup.PAPER_TABLE_5],
    }
    return {"paper": "hidup", "figures": figures}


def test_claims_hold_where_the_numbers_do():
    assert all(c["holds"] for c in hidup.claims(rows()))
    failing = {c["name"]: c for c in hidup.claims(rows(speedup=0.8)) if not c["holds"]}
    assert any(name.startswith("figure 7") for name in failing)
    assert any(name.startswith("figure 8") for name in failing)
    data = rows()
    data["figures"]["11"].reverse()
    for n, row in enumerate(data["figures"]["11"]):
        row["sharded_published"] = n
    data["figures"]["12"][0]["layer_published"] = []
    failing = [c for c in hidup.claims(data) if not c["holds"]]
    assert [c["name"].split(":")[0] for c in failing] == ["figure 11", "figure 12"]
    assert failing[1]["why"]


def test_pictures_are_drawn(tmp_path):
    files = report.save_pictures(hidup, "hidup", rows(), tmp_path)
    assert sorted(files) == ["11", "14", "6", "7", "8"]
    for path in files.values():
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("figures", few_of(("12", "11,table 4", "7,8")))
@pytest.mark.long
def test_small_models(figures):
    numbers = figures.split(",")
    data = hidup.simulate(numbers, report.one_by_one, layers=2)
    assert list(data["figures"]) == numbers
    claims = hidup.claims(data)
    assert claims
    assert all(set(c) >= {"name", "paper", "ours", "holds"} for c in claims)
    json.dumps(report.as_json(hidup, data, {}))
    for row in data["figures"].get("8", ()):
        assert row["lower_bound_ms"] <= row["hidup_ms"] <= min(row["baselines_ms"].values())
