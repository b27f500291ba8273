"""Converts an fx graph into a `Program`: any graph with functional collectives or our all-to-all in it.

Every op node becomes an instruction; the elements of a tuple are its outputs. Bytes and FLOPs come from the
shapes of the fake results (`meta["val"]`), so nothing is executed; the number of rows is that of an evenly
spread, dropless batch (`ops.base.Now`). The exchange of counts blocks the host, so it is
computation. A functional collective and its `wait_tensor` are one instruction, for which all readers of the
result wait. All-gathers and reduce-scatters have the attribute `collective`. Ops that draw from torch's
global random generator (`draws_random_numbers`) overwrite its state, so that they keep their order.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from lancet_kernels.graph.meta import (
    GROUP,
    KEPT_BYTES,
    MILLISECONDS,
    SAME_CALL,
    STANDS_FOR,
    UNIT,
    WRITTEN_INTO,
    forward_nodes,
    not_before,
)
from lancet_kernels.graph.ops import COLLECTIVE_NAMESPACE, STARTED, OpFacts, argument, facts
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec, whole_name
from lancet_kernels.ops.moe.gates import parse_gate

GENERATOR = "state of the random generator"
"""The tensor that every random op overwrites; an input of Programs with random ops."""
GATHERS = "gathers_parameters"
"""Attribute of a collective that gathers sharded parameters (`schedules.rewrite.gathers`)."""
_WAITS = torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional.wait_tensor.default
"""Waits for a collective, and gives the storage that it fills."""
_UNSAFE_VIEW = "aten._unsafe_view"
"""A view without alias annotation in its schema, because nothing else reads its input."""


def program_from_fx(module: fx.GraphModule, name: str = "graph") -> Program:
    """The Program of a module's graph (see `program_from_graph`)."""
    return program_from_graph(module.graph, name)


def program_from_graph(
    graph: fx.Graph,
    name: str = "graph",
    unchanged: Program | None = None,
    parts: Mapping[str, tuple[float, int]] = MappingProxyType({}),
) -> Program:
    """The Program of an fx graph whose nodes have `meta["val"]` (as in every traced graph).

    A placeholder without `val` is not a tensor; an attribute without `val` has the module's value. Optional
    entries of `meta`: `MILLISECONDS`, `GROUP` and `WRITTEN_INTO`.

    Args:
        unchanged: the Program of the graph before some nodes were replaced; the instructions of all other
            nodes are copied from it, with their times.
        parts: by name of a part of an instruction, its milliseconds and the number of parts.
    Instructions and tensors are named like their nodes; element i of a tuple is named `node.i`.
    """
    nodes = list(graph.nodes)
    forward = forward_nodes(nodes)
    after = not_before(nodes, forward)
    tensors: dict[str, TensorSpec] = {}
    instructions, inputs, parameters = [], [], []
    for node in nodes:
        if unchanged is not None and node.name in unchanged.index:
            instruction = unchanged.instructions[unchanged.index[node.name]]
            tensors.update((t, unchanged.tensors[t]) for t in instruction.outputs)
            # A result carried from part to part is read from the last part, by that part's name.
            read = tuple(dict.fromkeys(_tensor_names(node.all_input_nodes)))
            behind = after[node].name if node in after else ""
            same = (read, behind) == (instruction.inputs, instruction.after)
            instructions.append(instruction if same else replace(instruction, inputs=read, after=behind))
            continue
        if node.op in ("placeholder", "get_attr"):
            for spec in _specs(node):
                tensors[spec.name] = spec
                inputs.append(spec.name)
                # In a joint graph, the descriptor tells parameters from inputs; in any other graph,
                # parameters are attributes.
                if node.op == "get_attr" or hasattr(node.meta.get("desc"), "target"):
                    parameters.append(spec.name)
        elif is_instruction(node):
            outputs = _specs(node)
            owner = WRITTEN_INTO.get(node)
            owned = outputs if owner is None else [replace(s, alias_of=owner, bytes=0) for s in outputs]
            tensors.update((spec.name, spec) for spec in owned)
            phase = Phase.FORWARD if node in forward else Phase.BACKWARD
            instruction = _instruction(node, outputs, phase, after.get(node))
            if node.name in parts:
                milliseconds, count = parts[node.name]
                attributes = {**instruction.attributes, "parts": count}
                if unchanged is not None and (whole := whole_name(node.name)) in unchanged.index:
                    uncut = unchanged.instructions[unchanged.index[whole]].attributes
                    attributes |= {"link": uncut["link"]} if "link" in uncut else {}
                instruction = replace(instruction, milliseconds=milliseconds, attributes=attributes)
            instructions.append(instruction)
    if any(GENERATOR in i.mutates for i in instructions):
        tensors[GENERATOR] = TensorSpec(GENERATOR, (), "int64", bytes=0)
        inputs.append(GENERATOR)
    results = [name for node in nodes if node.op == "output" for name in _tensor_names(node.all_input_nodes)]
    ends = tuple(dict.fromkeys(results))
    return Program(name, tuple(instructions), tensors, tuple(inputs), ends, tuple(parameters))


def is_instruction(node: fx.Node) -> bool:
    """Does the node call an op? An element of another one's result (`is_element`) does not count."""
    return node.op in ("call_function", "call_method", "call_module") and not is_element(node)


def is_element(node: fx.Node) -> bool:
    """Is the node part of another one's result: an element of a tuple, or what has arrived (`is_wait`)?"""
    return node.target is operator.getitem or is_wait(node)


def is_wait(node: fx.Node) -> bool:
    """Does the node wait for a functional collective?"""
    return node.target in _WAITS


def with_elements(node: fx.Node) -> list[fx.Node]:
    """The node and the elements of its result, also of nested tuples."""
    return [node, *(n for user in node.users if is_element(user) for n in with_elements(user))]


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a result, or elements of it."""
    return [reader for part in with_elements(node) for reader in part.users if not is_element(reader)]


def is_functional_collective(node: fx.Node) -> bool:
    """Is the node the start of one of torch's functional collectives?"""
    return is_collective(node) and op_name(node).startswith(COLLECTIVE_NAMESPACE)


def is_collective(node: fx.Node) -> bool:
    """Is the node a collective, which occupies the link instead of the device?"""
    return is_instruction(node) and facts_of(node).kind.is_communication


def draws_random_numbers(node: fx.Node) -> bool:
    """Does the op draw from torch's global random generator? The order of such ops must not change."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Fused attention has the tag, but draws nothing without dropout.
    return "dropout_p" not in _signature(node.target).names or _arguments(node).get("dropout_p", 0.0) != 0.0


def is_view(node: fx.Node) -> bool:
    """Does the op return one tensor that shares its input's storage (with any strides)?"""
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(schema.returns) != 1 or not isinstance(node.meta.get("val"), Tensor):
        return False
    info = schema.returns[0].alias_info
    if op_name(node) == _UNSAFE_VIEW:
        return True
    return info is not None and not info.is_write and node.target.is_view


def facts_of(node: fx.Node) -> OpFacts:
    """The facts of a node's op."""
    return facts(op_name(node))


def host_waits(graph: fx.Graph) -> list[str]:
    """Names of the nodes that make the host wait, in order; a collective also where it only starts."""
    return [node.name for node in graph.nodes if is_instruction(node) and _waits(node)]


def _waits(node: fx.Node) -> bool:
    waits = facts(STARTED.get(node.target, op_name(node))).host_waits
    return waits is not None and waits(node)


def op_name(node: fx.Node) -> str:
    """`aten.mm`, `lancet.gate`: namespace and name of the op, without the overload."""
    return _name_of(node.target)


@functools.cache
def _name_of(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def tensor_names(node: fx.Node) -> list[str]:
    """Names of the tensors that a node returns; for a getitem node, the name of the element; for a wait, that
    of the tensor it waits for.

    A node that reassembles a tensor from its parts has that tensor's name (`STANDS_FOR`).
    """
    if STANDS_FOR.on(node):
        return [STANDS_FOR.of(node)]
    if is_wait(node):
        return tensor_names(node.args[0])
    if node.target is operator.getitem:
        source, index = node.args
        return [name for name in [f"{source.name}.{index}"] if name in tensor_names(source)]
    value = _value(node)
    if isinstance(value, (tuple, list)):
        return [f"{node.name}.{i}" for i, v in enumerate(value) if isinstance(v, Tensor)]
    return [node.name] if isinstance(value, Tensor) else []


def _value(argument: object) -> Any:
    """The fake result of a node, or the module's value for an attribute; any other argument is returned as
    is."""
    if not isinstance(argument, fx.Node):
        return argument
    if "val" not in argument.meta and argument.op == "get_attr":
        return operator.attrgetter(argument.target)(argument.graph.owning_module)
    return argument.meta.get("val")


class _Signature(NamedTuple):
    """What the schema of an op says.

    names: of its arguments. shared: (output, argument) that may share storage. written: the arguments that
    it overwrites.
    """

    names: tuple[str, ...]
    shared: tuple[tuple[int, str], ...]
    written: frozenset[str]


@functools.cache
def _signature(target: object) -> _Signature:
    """Empty for what is no op of torch."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return _Signature((), (), frozenset())
    aliased = [argument for argument in schema.arguments if argument.alias_info is not None]
    shared = (
        (i, argument.name)
        for i, result in enumerate(schema.returns)
        if result.alias_info is not None
        for argument in aliased
        # `Tensor(a -> *)` annotates an op that returns a list of views of the argument.
        if argument.alias_info.before_set & result.alias_info.before_set
        or "*" in argument.alias_info.after_set
    )
    written = (argument.name for argument in aliased if argument.alias_info.is_write)
    return _Signature(tuple(a.name for a in schema.arguments), tuple(shared), frozenset(written))


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments that a node passes to an op of torch, by name; none for what is no op."""
    names = _signature(node.target).names
    return dict(zip(names, node.args, strict=False)) | (dict(node.kwargs) if names else {})


def _tensor_names(nodes: Iterable[fx.Node]) -> list[str]:
    return [name for node in nodes for name in tensor_names(node)]


def _instruction(
    node: fx.Node, outputs: list[TensorSpec], phase: Phase, after: fx.Node | None
) -> Instruction:
    op = op_name(node)
    same = SAME_CALL.of(node) if SAME_CALL.on(node) else {}
    if "costs" not in same:
        same["costs"] = _attributes(node), _flops(node, op), _bytes(node, op, outputs)
    own, flops, moved = same["costs"]
    attributes, kind = dict(own), facts(op).kind
    # Each group has its own communication costs (`graph.costs.clusters`).
    if GROUP.on(node):
        attributes["group"] = GROUP.of(node)
        # Only experts' all-to-alls count as such.
        kind = Kind.OTHER_COMMUNICATION if kind is Kind.ALL_TO_ALL else kind
    if facts(op).collective:
        attributes["collective"] = facts(op).collective
        if UNIT.on(node):
            attributes[GATHERS] = True
    return Instruction(
        name=node.name,
        op=op,
        inputs=tuple(dict.fromkeys(_tensor_names(node.all_input_nodes))),
        outputs=tuple(spec.name for spec in outputs),
        kind=kind,
        phase=phase,
        flops=flops,
        bytes=moved,
        milliseconds=MILLISECONDS.get(node),
        mutates=_mutated(node),
        attributes=attributes,
        after="" if after is None else after.name,
    )


def _specs(node: fx.Node) -> list[TensorSpec]:
    value = _value(node)
    values = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, Tensor)]
    aliases = _aliased(node)
    specs = [
        TensorSpec(
            name, tuple(map(int, v.shape)), str(v.dtype).removeprefix("torch."), alias_of=aliases.get(i)
        )
        for i, (name, v) in enumerate(zip(tensor_names(node), values, strict=True))
    ]
    if KEPT_BYTES.on(node):
        specs[-1] = replace(specs[-1], bytes=KEPT_BYTES.of(node))
    return specs


def _aliased(node: fx.Node) -> dict[int, str]:
    """Position of an output -> name of the input whose storage it shares."""
    aliases = {}
    if shared := _signature(node.target).shared:
        arguments = _arguments(node)
        for i, name in shared:
            value = arguments.get(name)
            if isinstance(value, fx.Node) and tensor_names(value):
                aliases[i] = tensor_names(value)[0]
    if op_name(node) == _UNSAFE_VIEW and tensor_names(node.args[0]):
        aliases[0] = tensor_names(node.args[0])[0]
    # A list of views (unbind, split): every element shares the input's storage.
    value = _value(node)
    if 0 in aliases and isinstance(value, (tuple, list)):
        aliases = dict.fromkeys(range(len(value)), aliases[0])
    return aliases


def _mutated(node: fx.Node) -> tuple[str, ...]:
    drawn = (GENERATOR,) if draws_random_numbers(node) else ()
    overwritten = _signature(node.target).written
    if not overwritten:
        return drawn
    nodes: list[fx.Node] = []
    for name, value in _arguments(node).items():
        if name in overwritten:
            fx.map_arg(value, nodes.append)
    return drawn + tuple(_tensor_names(nodes))


def _attributes(node: fx.Node) -> dict[str, Any]:
    """The arguments that are JSON values, by name; normalized `dims` for transposes and reductions; for a
    gate, whether it is partitionable."""
    arguments = _arguments(node)
    # Names of process groups and exchanges are not part of the structure, nor are numbers of contexts, which
    # count what a rank has captured.
    for name in ("group", "group_name", "layer", "context"):
        arguments.pop(name, None)
    if op_name(node) == "lancet.dropout":  # nor are seeds: repeated layers have equal attributes
        del arguments["seed"], arguments["site"]
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items() if _is_plain(v)}
    if op_name(node) == "aten.transpose":
        plain |= {"dims": [plain.pop("dim0"), plain.pop("dim1")], "swap": True}
    elif op_name(node) in ("aten.sum", "aten.mean"):
        dims = plain.pop("dim", None)
        rank = _value(node.args[0]).dim()
        plain["dims"] = list(range(rank)) if dims is None else dims
    elif op_name(node) == "lancet.gate":
        plain["partitionable"] = parse_gate(arguments["spec"]).partitionable
    return plain


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, (int, float, str, bool)) and not (
        isinstance(value, float) and not math.isfinite(value)
    )


def _flops(node: fx.Node, op: str) -> float:
    """FLOPs of matrix products and attention; other ops are bound by memory, so only their bytes count."""
    packet = getattr(node.target, "overloadpacket", None)
    is_attention = op.startswith("aten._scaled_dot_product") or op == "aten.scaled_dot_product_attention"
    result = facts(op).grouped_gemm
    if not (is_attention or result or packet in flop_registry):
        return 0.0
    values = fx.map_arg(node.args, _value)
    if result:
        experts = _value(node)[0] if result == "weight" else values[2][0]
        return 2.0 * values[0].shape[0] * experts.numel()
    if is_attention:
        # Fused kernels skip the masked half of causal attention, which torch's registry ignores.
        is_causal = _arguments(node).get("is_causal") is True
        return _attention_flops(values, "backward" in op) * (0.5 if is_causal else 1.0)
    by_name = fx.map_arg(node.kwargs, _value)
    return float(flop_registry[packet](*values, **by_name, out_val=_value(node)))


def _attention_flops(values: list[Any], backward: bool) -> float:
    """Query x key and probabilities x value, 2 FLOPs per multiply-add; the backward has five such
    products."""
    tensors = [v for v in values if isinstance(v, Tensor) and v.dim() == 4]
    # The first operand of the backward is the gradient.
    query, key, value = tensors[1:4] if backward else tensors[:3]
    batch, heads, sequence, width = query.shape
    product = 2.0 * batch * heads * sequence * key.shape[2] * max(width, value.shape[3])
    return product * (5 if backward else 2)


def _bytes(node: fx.Node, op: str, outputs: list[TensorSpec]) -> float:
    """Bytes read and written; 0 for a view; for communication the bytes on the link."""
    if outputs and all(spec.alias_of is not None for spec in outputs):
        return 0.0
    unread = argument(node, facts(op).hardly_read) if facts(op).hardly_read else None
    read = [n for n in node.all_input_nodes if n is not unread]
    values = [v for v in map(_value, read) if isinstance(v, Tensor)]
    if op == "lancet.all_to_all":
        return float(_content_bytes(_value(node.args[0])))
    if facts(op).collective == "reduce_scatter":
        # As for an all-gather, the bytes of the whole, not of the shard.
        return float(sum(_content_bytes(v) for v in values))
    if facts(op).kind.is_communication:
        return float(sum(spec.content_bytes for spec in outputs))
    own = _value(node)
    values += own if isinstance(own, (tuple, list)) else [own]
    return float(sum(_content_bytes(v) for v in values if isinstance(v, Tensor)))


def _content_bytes(tensor: Tensor) -> int:
    """Bytes as of a dense tensor; sparse ones have no `nbytes`."""
    return tensor.numel() * tensor.element_size()
