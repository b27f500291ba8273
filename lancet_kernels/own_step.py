"""A training step of the user, planned for simulated ranks: `FILE.py:make_step`.

`make_step()` returns the module and the example inputs that `optimize` would get. It runs as rank 0 of a fake
job, and its tensors have no contents.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lancet_kernels.captured_step import CapturedStep
from lancet_kernels.errors import UserError
from lancet_kernels.fake_ranks import fake_ranks, without_contents
from lancet_kernels.graph.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs import Cost, CostModel
from lancet_kernels.graph.program import Program
from lancet_kernels.guards import example_arguments, refuse_sharded
from lancet_kernels.schedules.realize import GraphCutter

_RETURNS = "(module, example inputs), the inputs a tuple by position or a dict by name"


class PricedStep(NamedTuple):
    """A training step as the planner wants it; `program` may have more in it than the graph."""

    module: fx.GraphModule
    program: Program
    cost: Cost

    @property
    def cutter(self) -> GraphCutter:
        """Gives the program with ranges cut."""
        return GraphCutter(self.module, self.program, self.cost)


@dataclass(frozen=True)
class OwnStep:
    """The simulated setting: the step that a function of a file returns, on `gpus` ranks of a cluster.

    module: `FILE.py:function`. cluster: a name, or the path of a TOML file.
    """

    module: str
    cluster: str
    gpus: int

    assumptions = ("the optimizer's step is not in it, as it is not in what optimize() plans",)

    @cached_property
    def hardware(self) -> Cluster:
        return load_cluster(self.cluster)

    @cached_property
    def priced(self) -> PricedStep:
        """The program that `optimize` would plan on these ranks, and what it costs there.

        Raises: UserError for GPUs that are not whole nodes, and for errors in the file, the function or the
        module; CaptureError for a module that is not one graph.
        """
        # First: GPUs that are not whole nodes are a clearer complaint than what follows from them.
        CostModel.for_cluster(self.hardware, self.gpus)
        make_step = load_function(self.module)
        with fake_ranks(self.gpus):
            model, inputs = self._made_by(make_step)
            step = capture_step(model, inputs)
            graph = step.costed(step.captured.joint, [], self.hardware)
            return PricedStep(graph.module, graph.program, graph.cost)

    def _made_by(self, make_step: Callable[[], object]) -> tuple[nn.Module, Sequence | Mapping[str, object]]:
        try:
            with without_contents():
                made = make_step()
        except UserError:
            raise
        except Exception as error:
            reads = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
            raise UserError(
                self.module,
                got=_reason(error, Path(self.module.rpartition(":")[0])),
                expected="a step that reads no values of tensors, which have none while planning"
                if reads
                else _RETURNS,
                do="leave out what reads values; shapes are all that counts here"
                if reads
                else f"correct it; {make_step.__name__}() is called on rank 0 of a job that is there already",
            ) from error
        if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise UserError(
                self.module, got=_kinds(made), expected=_RETURNS, do="return what optimize() would get"
            )
        model, inputs = made
        if isinstance(inputs, Tensor) or not isinstance(inputs, (tuple, list, Mapping)):
            got = f"{type(model).__name__} with {type(inputs).__name__} as inputs"
            raise UserError(self.module, got=got, expected=_RETURNS, do="write (x,) for one input")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError(
                self.module,
                got=f"{type(model).__name__} without parameters to train",
                expected="a training step",
                do="return the module that holds model and loss",
            )
        return model, inputs

    def describe(self) -> str:
        """One line for headings."""
        return f"{self.module}, {self.gpus} ranks of {self.hardware.name} ({self.hardware.description})"

    def facts(self) -> dict[str, object]:
        """What was simulated, as JSON values."""
        return {"module": self.module, "cluster": self.hardware.name, "gpus": self.gpus}


def capture_step(model: nn.Module, inputs: Sequence | Mapping[str, object]) -> CapturedStep:
    """The step of a model on the ranks of this process, as `optimize` would plan it.

    Raises: UserError, CaptureError.
    """
    refuse_sharded(model)
    return CapturedStep(model, *example_arguments(model, inputs), True, None)


def load_function(spec: str) -> Callable[[], object]:
    """The function that `FILE.py:name` stands for; the file is run as a module.

    Raises: UserError for a spec without function, a missing file, a file that fails, a missing function.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise UserError(
            "module", got=spec, expected="FILE.py:function", do="name the function too, step.py:make_step say"
        )
    file = Path(path)
    if not file.is_file():
        raise UserError(
            "module", got=f"{path}, which is no file", expected="a Python file", do="check the path"
        )
    found = getattr(_run_file(file), name, None)
    if not callable(found):
        what = f"no {name}" if found is None else f"a {name} that is no function"
        raise UserError(
            "module", got=f"{what} in {path}", expected=f"a function {name}()", do="define it there"
        )
    return found


def _run_file(file: Path) -> ModuleType:
    name = f"own_step_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError("module", got=str(file), expected="a Python file (.py)", do="check the path")
    module = importlib.util.module_from_spec(spec)
    # As for `python FILE.py`: what lies beside it can be imported, and its classes know their module.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"file {file}", got=_reason(error, file), expected="a file that can be imported", do="correct it"
        ) from error
    return module


def _reason(error: Exception, file: Path) -> str:
    """`ValueError: first line of its message (step.py, line 12)`: the innermost line of the file."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    lines = [
        f.lineno
        for f in traceback.extract_tb(error.__traceback__)
        if Path(f.filename).resolve() == file.resolve()
    ]
    return f"{type(error).__name__}: {text}" + (f" ({file.name}, line {lines[-1]})" if lines else "")


def _kinds(made: object) -> str:
    """`(Linear, Tensor, Tensor)` of a tuple of these, `None`, `Linear`."""
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(one).__name__ for one in made)})"
    return "None" if made is None else f"a {type(made).__name__}"
