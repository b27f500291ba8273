"""A user's training step, `FILE.py:make_step`, captured for simulated ranks.

`make_step()` returns the module and the example inputs for `optimize`; it runs as rank 0 of a fake job, with
fake tensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import CostModel
from lancet_kernels.optimization.guards import check_model, example_arguments
from lancet_kernels.optimization.step import capture_step
from lancet_kernels.schedules.rewrite.walk import Step

_RETURNS = "(module, example inputs), the inputs a tuple by position or a dict by name"


@dataclass(frozen=True)
class OwnStep:
    """A simulated setting: the step that a function in a file returns, on `gpus` ranks of a cluster.

    module: `FILE.py:function`. cluster: a name, or the path of a TOML file.
    """

    module: str
    cluster: str
    gpus: int

    assumptions = ("without the optimizer's step",)

    @cached_property
    def hardware(self) -> Cluster:
        return load_cluster(self.cluster)

    @cached_property
    def priced(self) -> Step:
        """The program that `optimize` would plan on these ranks, with its costs there.

        Raises: UserError for GPUs that are not whole nodes, and for errors in the file, the function or the
        module; CaptureError for a module that is not one graph.
        """
        # First, for a clear error if the GPUs do not fill nodes.
        CostModel.for_cluster(self.hardware, self.gpus)
        make_step = load_function(self.module)
        with fake_ranks(self.gpus):
            model, inputs = call_make_step(self.module, make_step, without_contents())
            check_model(model)
            return capture_step(model, example_arguments(model, inputs), "mean").costed(self.hardware)

    def describe(self) -> str:
        """One line for headings."""
        return f"{self.module}, {self.gpus} ranks of {self.hardware.name} ({self.hardware.description})"

    def facts(self) -> dict[str, object]:
        return {"module": self.module, "cluster": self.hardware.name, "gpus": self.gpus}


def call_make_step(
    spec: str, make_step: Callable[[], object], mode: AbstractContextManager
) -> tuple[nn.Module, Sequence | Mapping[str, object]]:
    """The module and the example inputs that the function of `spec` returns, called in a mode of torch.

    Raises: UserError for a function that fails, or returns something else.
    """
    try:
        with mode:
            step = make_step()
    except UserError:
        raise
    except Exception as error:
        expected, do = _RETURNS, f"correct it; {make_step.__name__}() runs on a rank of an initialized job"
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            expected = "a step that does not read values of tensors, which are fake while planning"
            do = "remove the code that reads values; only shapes matter here"
        got = _reason(error, Path(spec.rpartition(":")[0]))
        raise UserError(spec, got=got, expected=expected, do=do) from error
    if not (isinstance(step, (tuple, list)) and len(step) == 2 and isinstance(step[0], nn.Module)):
        raise UserError(spec, got=_kinds(step), expected=_RETURNS, do="return what optimize() would get")
    model, inputs = step
    if isinstance(inputs, Tensor) or not isinstance(inputs, (tuple, list, Mapping)):
        got = f"{type(model).__name__} with {type(inputs).__name__} as inputs"
        raise UserError(spec, got=got, expected=_RETURNS, do="write (x,) for one input")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            spec,
            got=f"{type(model).__name__} without parameters to train",
            expected="a training step",
            do="return the module that holds model and loss",
        )
    return model, inputs


def load_function(spec: str) -> Callable[[], object]:
    """The function `FILE.py:name`; the file is executed as a module.

    Raises: UserError for a spec without function, a missing file, a file that fails, or a missing function.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise UserError(
            "module", got=spec, expected="FILE.py:function", do="add the function, as in step.py:make_step"
        )
    file = Path(path)
    if not file.is_file():
        raise UserError(
            "module", got=f"{path}, which does not exist", expected="a Python file", do="check the path"
        )
    function = getattr(_run_file(file), name, None)
    if not callable(function):
        what = f"no {name}" if function is None else f"a {name} that is not a function"
        raise UserError(
            "module", got=f"{what} in {path}", expected=f"a function {name}()", do="define it there"
        )
    return function


def _run_file(file: Path) -> ModuleType:
    name = f"own_step_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError("module", got=str(file), expected="a Python file (.py)", do="check the path")
    module = importlib.util.module_from_spec(spec)
    # As with `python FILE.py`, it can import modules from its folder, and its classes can be pickled.
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


def _kinds(result: object) -> str:
    """`(Linear, Tensor, Tensor)` of a tuple of these, `None`, `Linear`."""
    if isinstance(result, (tuple, list)):
        return f"({', '.join(type(one).__name__ for one in result)})"
    return "None" if result is None else f"a {type(result).__name__}"


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A context in which this process is rank 0 of `ranks` ranks whose collectives do nothing. One rank has
    no group.

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

    # New groups inherit the timeout of these options.
    options = FakeProcessGroup.Options()  # type: ignore[call-arg]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore(), pg_options=options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_contents() -> FakeTensorMode:
    """A context in which new tensors are fake, without memory; real ones may be read there."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Without its memo of weak references, with which torch refuses `module.to(dtype)`.
    mode.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
    return mode
