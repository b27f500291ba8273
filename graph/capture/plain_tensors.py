"""Plain tensors: those that a forward reads and that are neither inputs nor parameters nor buffers.

An attribute, an element of a list, a field of a configuration, a variable of a Python module. A trace would
keep the tensor that it met; here they are inputs of the graph, read anew before each call, so another tensor
in the place of one is what the next call reads. (Its dtype, sizes and strides are assumptions of the trace.)
"""

from __future__ import annotations

from types import CodeType

import torch
from torch import Tensor, fx, nn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.traced_function import TracedFunction

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
