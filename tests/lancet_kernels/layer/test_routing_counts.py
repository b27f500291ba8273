"""Rows of experts that a run counts: those of the gates' own statistics, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lancet_kernels import MoELayer, RoutingSums, moe_losses
from lancet_kernels.layer.model_layers import RoutingCounts, busiest
from lancet_kernels.predict.question import Routing
from tests.ranks import RankPool

E = 4


class Two(nn.Module):
    """Two MoE layers, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoELayer(8, 8, E, gate="topk", top_k=2, capacity_factor=None) for _ in range(2)
        )

    def forward(self, x_TD: Tensor) -> tuple[Tensor, list[RoutingSums]]:
        sums = []
        for layer in self.layers:
            y_TD, of_layer = layer(x_TD, return_sums=True)
            x_TD = x_TD + y_TD
            sums.append(of_layer)
        return x_TD, sums


def counts_of_steps(rank: int, path: str) -> list[list[int]]:
    """Counts two of three steps in both ways, and writes them."""
    torch.manual_seed(0)
    model, generator = Two(), torch.Generator().manual_seed(rank)
    rows, statistics = RoutingCounts(model), RoutingCounts()
    for step in range(3):
        x_TD = torch.randn(5 + rank, 8, generator=generator)
        if step == 1:
            model(x_TD)[0].sum().backward()
            continue
        with rows.counting():
            y_TD, sums = model(x_TD)
        y_TD.sum().backward()  # counts nothing
        statistics.add(moe_losses(sums).assigned)
    assert rows.by_layer() == statistics.by_layer()
    rows.save(path)
    return rows.by_layer()


def test_rows_are_those_of_the_statistics(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    alone = counts_of_steps(0, str(path))
    assert [sum(layer) for layer in alone] == [2 * 2 * 5] * 2
    first, second = pool.run(_on_rank, str(path))
    assert first == second
    assert [sum(layer) for layer in first] == [2 * 2 * (5 + 6)] * 2
    assert json.loads(path.read_text()) == {"assigned": first}
    assert Routing.of(str(path), E, 2).load(2).time == pytest.approx(busiest(first, 2))


def _on_rank(path: str) -> list[list[int]]:
    return counts_of_steps(torch.distributed.get_rank(), path)


def test_busiest_by_hand() -> None:
    """The example of the function."""
    assert busiest([[3, 1, 2, 2], [1, 1, 3, 3]], 2) == 1.25
    assert busiest([[1, 3], [0, 0]], 2) == 1.5, "a layer without rows says nothing"
    assert busiest([[1, 3], [1, 1, 3, 3]], 2) == 1.5, "layers may have other numbers of experts"
