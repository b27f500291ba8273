"""Plain tensors: those that a forward reads and that are neither inputs nor parameters nor buffers.

An attribute, an element of a list, a field of a configuration, a variable of a Python module. A trace would
keep the tensor that it met; here they are inputs of the graph, read anew before each call, so another tensor
in the place of one is what the next call reads. (Its dtype, sizes and strides are assumptions of the trace.)
`TracedFunction` is what torch traces for a module, in whose expressions a trace names what it reads.
"""

from __future__ import annotations

import re
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import get_traced_fn
from torch._dynamo.guards import _get_closure_vars

from lancet_kernels.errors import UserError


class TracedFunction:
    """The forward of a module, or the call around it where the module has hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._function = get_traced_fn(module)[0]
        self.code = self._function.__code__
        if self.code.co_argcount:
            self._self_name = self.code.co_varnames[0]
            self._self_expression = f"L['{self._self_name}']"
        else:
            # A wrapper (*args, **by_name).
            self._self_name = self.code.co_varnames[self.code.co_kwonlyargcount]
            self._self_expression = f"L['{self._self_name}'][0]"

    def locals(self, module: nn.Module) -> dict[str, object]:
        """The local variables that expressions refer to, without the arguments of the call."""
        is_argument = self._self_expression == f"L['{self._self_name}']"
        by_name: dict[str, object] = {self._self_name: module if is_argument else (module,)}
        cells = self._function.__closure__ or ()
        for name, cell in zip(self.code.co_freevars, cells, strict=True):
            by_name[name] = cell.cell_contents
        return by_name

    def value(self, expression: Any, module: nn.Module) -> Any:
        """What an expression, as text or compiled, stands for now."""
        scope = {"L": self.locals(module), "G": self._function.__globals__}
        return eval(expression, _get_closure_vars(), scope)

    def reads_arguments(self, expression: str) -> bool:
        """Does an expression depend on the arguments of the call, rather than on the module, a variable
        around it or one of a Python module?"""
        closure = {f"L['{name}']" for name in self.code.co_freevars}
        rest = expression.replace(self._self_expression, "")
        return not set(re.findall(r"L\['\w+'\]", rest)) <= closure

    def plain(self, code: str) -> str:
        """An expression of torch's guards, as a user would write it.

        `L['self']._modules['a'].p == 0.1` -> `a.p == 0.1`
        """
        code = code.replace(self._self_expression, "")
        code = re.sub(r"^not ___dict_contains\('(\w+)', (.*?)\.?__dict__\)$", r"no \2.\1", code)
        code = re.sub(r"(?:\._modules|\._parameters|\._buffers|\.__dict__)?\['(\w+)'\]", r".\1", code)
        code = re.sub(r"___check_type_id\((.*?), \d+\).*", r"type of \1", code)
        code = re.sub(r"___check_obj_id\((.*?), \d+\).*", r"identity of \1", code)
        code = re.sub(r"^not (.*)\._(\w+_hooks)$", r"no \2 on \1", code)
        return re.sub(r"(?:(?<![\w)\]'])|(?<= '))\.(?=[A-Za-z_])", "", code)


HOLDER = "_plain_tensors"
"""The submodule of the traced module that has them as buffers."""


class PlainTensors:
    """The plain tensors of a module, and what its trace reads instead of them.

    paths: by name in the traced module, where they are, as a user would write it.
    """

    def __init__(self, module: nn.Module, traced: fx.GraphModule, function: TracedFunction) -> None:
        """Args: traced: the module's trace; its placeholders for state become attributes.

        Raises: UserError for what would be a constant of the graph, although it changes; for a tensor that
            requires a gradient: optimizers, checkpoints and sums over ranks would not know it.
        """
        self._module, self._function = module, function
        self._expressions: dict[str, CodeType] = {}
        self.paths: dict[str, str] = {}
        # The first name of each parameter and buffer.
        state = [*module.named_buffers(), *module.named_parameters()]
        names = {id(tensor): name for name, tensor in state}
        holder = nn.Module()
        for node in traced.graph.find_nodes(op="placeholder"):
            expression = node._dynamo_source.name
            if expression.startswith("random_value"):
                raise self._refuse("a random number of Python's", "random numbers of torch", "torch.rand")
            if function.reads_arguments(expression):
                continue
            if expression.startswith("___from_numpy("):
                path = function.plain(expression.removeprefix("___from_numpy(").removesuffix(")"))
                got = f"the numpy array {path}, which a graph cannot read"
                raise self._refuse(got, "a tensor", "torch.from_numpy() where it is assigned, not in forward")
            tensor = function.value(expression, module)
            name = names.get(id(tensor))
            if name is None:
                leaf = f"t{len(self.paths)}"
                name = f"{HOLDER}.{leaf}"
                self.paths[name] = path = function.plain(expression)
                self._expressions[name] = compile(expression, name, "eval")
                if tensor.requires_grad:
                    got = f"{path}, which requires a gradient and is not registered"
                    do = "nn.Parameter as an attribute, nn.ParameterList or nn.ModuleList; compute in forward"
                    raise self._refuse(got, "parameters and what forward computes of them", do)
                holder.register_buffer(leaf, tensor)
            _read_attribute(traced.graph, node, name)
        if self.paths:
            traced.add_module(HOLDER, holder)
        traced.recompile()

    def _refuse(self, got: str, expected: str, do: str) -> UserError:
        return UserError(
            f"forward of {type(self._module).__name__}", got=got, expected=expected, do=f"use {do}"
        )

    def values(self) -> dict[str, Tensor]:
        """The tensors as they are now, by name."""
        return {
            name: self._function.value(expression, self._module)
            for name, expression in self._expressions.items()
        }


def _read_attribute(graph: fx.Graph, placeholder: fx.Node, name: str) -> None:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]), torch.no_grad():
        read = graph.create_node("get_attr", name)
    read.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(read)
