"""One op, cut as its rule says, run part by part, put together again, and compared with the uncut op.

Written without a look at `schedules.rewrite.cut`, so that both are checked against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from lancet_kernels.graph.from_fx import op_name, program_from_fx, tensor_names
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Instruction, Program
from lancet_kernels.graph.rules.rules import CARRIED, IRREGULAR, PARTIAL, WHOLE, WINDOW, Form, Rule
from lancet_kernels.ops.base import during

Values = Mapping[fx.Node, object]

SHAPE_ARGUMENT = dict.fromkeys(
    (f"aten.{op}" for op in "view reshape _unsafe_view expand slice_backward select_backward".split()), 1
)
LOSSES = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")
MEAN, SUM = 1, 2
"""As the argument `reduction` of a loss has it."""
COUNTS = {
    "lancet.all_to_all": (1, 2),
    "lancet.grouped_gemm": (1,),
    "lancet.grouped_gemm_dx": (1,),
    "lancet.grouped_gemm_dw": (2,),
    "lancet.grouped_gemm_dbias": (1,),
    "lancet.expert_activation": (1,),
    "lancet.expert_activation_backward": (2,),
}


def segments(count: Tensor) -> list[int]:
    """The rows of each segment, by expert, then rank. (One rank's rows lie alike in both orders.)"""
    return count.T.reshape(-1).tolist()


def window(values: Tensor, count: Tensor, p: int, parts: int) -> Tensor:
    """The rows in part p's window of slots, segment by segment."""
    lengths = segments(count)
    pieces = zip(values.split(lengths), lengths, strict=True)
    return torch.cat([piece[n * p // parts : n * (p + 1) // parts] for piece, n in pieces])


def put_together(pieces: list[Tensor], count: Tensor) -> Tensor:
    """Windows in the order of the parts -> all rows."""
    parts = len(pieces)
    split = [
        piece.split([n * (p + 1) // parts - n * p // parts for n in segments(count)])
        for p, piece in enumerate(pieces)
    ]
    return torch.cat([rows for of_segment in zip(*split, strict=True) for rows in of_segment])


class WrongRule(AssertionError):
    """The parts, cut and put together as the rule says, are not the uncut result."""


class UnequalUnits(Exception):
    """These sizes cannot be cut into that many parts."""


def one_op(target: Callable, args: Sequence[object], kwargs: Mapping | None = None) -> tuple[fx.Node, Values]:
    """A node that applies an op to tensors, in a graph of its own, and the values of its inputs."""
    graph, values, known = fx.Graph(), {}, {}
    mode = FakeTensorMode()

    def placeholder(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            node = graph.placeholder(f"in{len(known)}")
            node.meta["val"] = mode.from_tensor(leaf)
            known[id(leaf)] = node
            values[node] = leaf
        return known[id(leaf)]

    args, kwargs = torch.utils._pytree.tree_map(placeholder, (tuple(args), dict(kwargs or {})))
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode, during(expects_sizes=True):
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    graph.output(node)
    fx.GraphModule(torch.nn.Module(), graph)
    return node, values


def instruction_of(node: fx.Node) -> tuple[Instruction, Program]:
    program = _program_of(node.graph.owning_module)
    return program.instructions[program.index[node.name]], program


@lru_cache(maxsize=8)
def _program_of(module: fx.GraphModule) -> Program:
    return program_from_fx(module)


def ways(node: fx.Node, rule: Rule | None = None) -> list[tuple[Form, ...]]:
    """Every assignment the rule offers that needs no other op of an MoE layer."""
    instruction, program = instruction_of(node)
    rule = rule or rule_for(instruction) or Rule()
    assignments = partial(rule.assignments, instruction, program.tensors, contractions=True)
    every = [*assignments(only_experts=False), *assignments(only_experts=True)]
    return [way for way in dict.fromkeys(every) if IRREGULAR not in way]


def check_node(node: fx.Node, values: Values, parts: Sequence[int], rule: Rule | None = None) -> int:
    """Prove every way to cut the node for every number of parts. -> how many proofs.

    Raises: WrongRule.
    """
    instruction, program = instruction_of(node)
    rule = rule or rule_for(instruction)
    proofs = 0
    for way in ways(node, rule):
        for count in parts:
            try:
                check_way(node, values, instruction, program, rule, way, count)
            except UnequalUnits:
                continue
            proofs += 1
    return proofs


def check_way(
    node: fx.Node,
    values: Values,
    instruction: Instruction,
    program: Program,
    rule: Rule,
    way: tuple[Form, ...],
    parts: int,
) -> None:
    """One way, one number of parts."""
    forms = dict(zip((*instruction.inputs, *instruction.outputs), way, strict=True))
    shapes = {t: program.tensors[t].shape for t in forms}
    sizes = {shapes[t][form.dimension] for t, form in forms.items() if form.is_cut}
    units = min(sizes, default=parts)
    if units < parts or any(size % units for size in sizes):
        raise UnequalUnits

    def bounds(size: int, p: int) -> tuple[int, int]:
        scale = size // units
        return units * p // parts * scale, units * (p + 1) // parts * scale

    carried = {instruction.inputs[i]: o for i, o in rule.carried(instruction, program.tensors)}
    # The uncut op first.
    expected = _results(node, fx.map_arg((node.args, node.kwargs), values.__getitem__))
    pieces: list[list[Tensor]] = []
    windows = way[0] == WINDOW
    if windows:
        operand_count, result_count = (values[node.args[COUNTS[instruction.op][i]]] for i in (0, -1))
    where = f"{instruction.op} {[shapes[t] for t in forms]} cut {[*map(str, way)]} into {parts}"
    for p in range(parts):

        def part(source: fx.Node, p: int = p) -> object:
            (name,) = tensor_names(source) or (None,)
            if p and name in carried:
                return pieces[-1][carried[name]]
            form = forms.get(name, WHOLE)
            if form == WINDOW:
                return window(values[source], operand_count, p, parts)
            if not form.is_cut:
                return values[source]
            first, behind = bounds(shapes[name][form.dimension], p)
            return values[source].narrow(form.dimension, first, behind - first)

        args, kwargs = fx.map_arg((node.args, node.kwargs), part)
        args = list(args)
        if instruction.op in SHAPE_ARGUMENT and way[-1].is_cut:
            shape, dimension = list(shapes[instruction.outputs[0]]), way[-1].dimension
            first, behind = bounds(shape[dimension], p)
            shape[dimension] = behind - first
            args[SHAPE_ARGUMENT[instruction.op]] = shape
        if windows:
            for position in COUNTS[instruction.op]:
                count = args[position]
                args[position] = count * (p + 1) // parts - count * p // parts
        is_mean = instruction.op in LOSSES and args[3] == MEAN
        if is_mean:
            args[3] = SUM
        try:
            pieces.append(_results(node, (args, kwargs)))
        except (RuntimeError, IndexError, ValueError) as error:
            raise WrongRule(f"{where}: part {p} does not run: {error}") from error
        if instruction.op == "aten.mean" and way[-1] == PARTIAL:
            pieces[-1] = [piece * (args[0].numel() / values[node.args[0]].numel()) for piece in pieces[-1]]
    if is_mean and way[-1] == PARTIAL:
        total = sum(weight for _, weight in pieces)
        pieces = [[loss / total, weight] for loss, weight in pieces]
    for n, (whole, form) in enumerate(zip(expected, way[len(instruction.inputs) :], strict=True)):
        if form == CARRIED and n not in dict(rule.carries):
            continue  # marked `*`: nobody may rely on it
        try:
            results = [piece[n] for piece in pieces]
            joined = put_together(results, result_count) if form == WINDOW else _joined(results, form)
        except (RuntimeError, IndexError) as error:
            raise WrongRule(f"{where}: the parts do not go together: {error}") from error
        _compare(f"{where}, result {n}", joined, whole)


def _results(node: fx.Node, arguments: tuple) -> list[Tensor]:
    args, kwargs = arguments
    result = node.target(*args, **kwargs)
    return [t for t in result if isinstance(t, Tensor)] if isinstance(result, (tuple, list)) else [result]


def _joined(parts: list[Tensor], form: Form) -> Tensor:
    if form == PARTIAL:
        return sum(parts[1:], parts[0])
    if form == CARRIED:
        return parts[-1]
    return torch.cat(parts, form.dimension)


def _compare(where: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise WrongRule(f"{where}: shape {list(found.shape)} instead of {list(expected.shape)}")
    # Sums may be taken in another order; a vectorized function may round otherwise at the end of an array.
    tolerance = 1e-12 if expected.is_floating_point() else 0.0
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise WrongRule(f"{where}: {error}") from error


class Recorder(fx.Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, object] = {}

    def run_node(self, node: fx.Node) -> object:
        self.values[node] = super().run_node(node)
        return self.values[node]


def key_of(node: fx.Node) -> tuple:
    """What makes two nodes the same proof: op, overload, shapes, dtypes, attributes."""
    leaves = [leaf for source in node.all_input_nodes for leaf in _leaves(source.meta["val"])]
    values = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in leaves]
    plain = fx.map_arg((node.args, node.kwargs), lambda n: "tensor")
    return op_name(node), str(node.target), repr(values), repr(plain)


def _leaves(value: object) -> list[object]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
