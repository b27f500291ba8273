"""Counts how many tokens a run's routers send to each expert: the file for predictions with that routing
(`lancet plan --hf ... --routing counts.json`), and how much more than the mean the busiest rank gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, json_text
from lancet_kernels.layer.gradients import groups_of
from lancet_kernels.layer.model_layers import name_layers
from lancet_kernels.ops.base import during
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_rank, values_of_ranks


class RoutingCounts:
    """Counts the choices of a run, in one of two ways.

    Example: `counts = RoutingCounts(model)`, then `with counts.counting():` around some steps, on all ranks;
    or `counts = RoutingCounts()`, `counts.add(losses.assigned)` with the statistics of `MoELayer`s, on one
    rank. Then `counts.save("counts.json")`.

    Args: model: whose layers are counted. groups: as for `optimize`.
    """

    def __init__(self, model: nn.Module | None = None, groups: AnyGroups | None = None) -> None:
        self._groups = Groups() if model is None else groups_of(model, groups)
        if model is not None:
            name_layers(model)
        self._assigned: Tensor | None = None
        self._rows: dict[str, Tensor] = {}
        """By layer, rows of each of this rank's experts."""

    def add(self, assigned: Tensor) -> None:
        """Add a step's counts. Args: assigned: [layers, E], as `MoELosses.assigned`, of all ranks."""
        counts = assigned.detach().cpu()
        self._assigned = counts if self._assigned is None else self._assigned + counts

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which the rows that experts of this rank get are counted: one small sum a layer.
        Those of layers with backend="fused" are not."""
        with during(routed=self._rows):
            yield

    def by_layer(self) -> list[list[int]]:
        """[layers][E] of all ranks. Collective where a model is counted."""
        if self._assigned is not None:
            return self._assigned.tolist()
        rows = {layer: counts.tolist() for layer, counts in self._rows.items()}
        own = group_rank(self._groups.expert), rows
        of_ranks = values_of_ranks(own, self._groups.world, "counts of routing")
        ranks = 1 + max(rank for rank, _ in of_ranks)
        total: dict[str, list[int]] = {}
        for rank, counts_of in of_ranks:
            for layer, counts in counts_of.items():
                of_layer = total.setdefault(layer, [0] * len(counts) * ranks)
                for expert, count in enumerate(counts, rank * len(counts)):
                    of_layer[expert] += count
        return list(total.values())

    def save(self, path: str | Path) -> None:
        """Write the file on the first rank. Collective where a model is counted.

        Raises: UserError before anything was counted, and where it cannot be written.
        """
        by_layer = self.by_layer()
        if not by_layer:
            raise UserError(
                "counts", got="none", expected="those of a step", do="call add(), or run a step in counting()"
            )
        if group_rank(self._groups.world) == 0:
            with file_errors(str(path)):
                Path(path).write_text(json_text({"assigned": by_layer}) + "\n", encoding="utf-8")


def busiest(counts: Sequence[Sequence[float]], ranks: int) -> float:
    """Rows of the rank that gets most in a layer, relative to the mean of all ranks; the mean over layers.

    Args: counts: [layers][E], of experts that `ranks` ranks have in turn.
    Example: two ranks, layers with 3 1 2 2 and 1 1 3 3 rows: 4 of 4 and 6 of 4, so 1.25.
    """
    by_layer = (torch.tensor(layer, dtype=torch.float64) for layer in counts if any(layer))
    by_rank = [layer.unflatten(0, (ranks, -1)).sum(1) for layer in by_layer]
    return fmean(float(rows.max() / rows.mean()) for rows in by_rank) if by_rank else 1.0
