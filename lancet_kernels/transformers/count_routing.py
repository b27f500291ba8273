"""Counts the routing of a run of transformers' Trainer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lancet_kernels.errors import UserError
from lancet_kernels.layer.model_layers import RoutingCounts
from lancet_kernels.ops.comm.groups import AnyGroups


class CountRouting(TrainerCallback):
    """Counts the tokens of each expert, and writes them when training ends, for `lancet plan --routing`.

    Example: `Trainer(..., callbacks=[CountRouting("counts.json", every=100)])` on all ranks, of a model whose
    experts `convert` or `ep_implementation="lancet"` has divided.

    Args: every: one of so many steps is counted. groups: as for `optimize`.
    Raises: UserError for an invalid `every`; at the end of training as `RoutingCounts.save`.
    """

    def __init__(self, path: str | Path, every: int = 1, groups: AnyGroups | None = None) -> None:
        if type(every) is not int or every < 1:
            raise UserError("every", got=repr(every), expected="a number of steps", do="use 1 or more")
        self._path, self._every, self._groups = path, every, groups
        self._counts: RoutingCounts | None = None
        self._step = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        self._counts = RoutingCounts(values["model"], self._groups)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._counts is not None and state.global_step % self._every == 0:
            self._step.enter_context(self._counts.counting())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Writes the file. Collective."""
        if self._counts is not None:
            self._counts.save(self._path)
