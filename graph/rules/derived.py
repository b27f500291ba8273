"""Equations that depend on an op's shapes and attributes: views, reductions, attention, norms, ...

Each function takes the shapes of an instruction's inputs (every tensor once) and outputs, and its attributes,
and returns its equation, or None if the instruction cannot be cut.

An equation such as `"t d, d f -> t f"` has the names of each operand's dimensions, and which may be cut.

Grammar, in addition to einsum's names, which are separated by spaces:

    ...      any number of leading dimensions, broadcast from the right; they get names of their own
    1        a dimension of size one, which cannot be cut
    name!    must not be cut, because the op mixes all of its elements (a softmax, a norm)
    name+    appears in inputs only; a cut gives partial results, whose sum is the whole result
    -        a scalar, or an operand that is always whole
    *        a result that is unused outside its part (a seed): the last part's replaces the whole one

A plain name that appears in inputs only is a contraction. Pipelines do not cut it, because adding its partial
sums costs too much; `contractions` lists it for tensor-parallel layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Equation:
    """A parsed equation: for each operand the names of its dimensions; None for one that cannot be cut."""

    inputs: tuple[tuple[str | None, ...], ...]
    outputs: tuple[tuple[str | None, ...], ...]
    whole: frozenset[str]
    """Names marked `!`."""
    summed: frozenset[str]
    """Names marked `+`."""
    any_part: tuple[int, ...] = ()
    """Positions of the outputs marked `*`."""

    @property
    def contractions(self) -> frozenset[str]:
        """Names that appear in inputs only: a cut gives partial sums."""
        return _axes_of(self.inputs) - _axes_of(self.outputs) - self.whole

    @property
    def cuttable(self) -> list[str]:
        """Names along which a pipeline may cut the op: those in every output that has names, and those marked
        `+`; without those marked `!`."""
        named = [o for o in self.outputs if any(n is not None for n in o)]
        everywhere = [n for n in sorted(_axes_of(named)) if all(n in o for o in named)]
        cut_names = [n for n in everywhere if n not in self.whole and n in _axes_of(self.inputs)]
        return cut_names + sorted(self.summed - self.whole)


def _axes_of(operands: Sequence[tuple[str | None, ...]]) -> frozenset[str]:
    return frozenset(n for operand in operands for n in operand if n is not None)


@lru_cache(maxsize=4096)
def parse(text: str, ranks: tuple[int, ...]) -> Equation:
    """The equation for operands of these ranks (inputs, then outputs).

    Example: `parse("... d, f d -> ... f", (3, 2, 3))` names the inputs (.1 .0 d) and (f d).
    """
    sides = text.split("->")
    assert len(sides) == 2, f"{text}: not inputs -> outputs"
    inputs, outputs = ([o.strip() for o in side.split(",")] for side in sides)
    assert len(inputs) + len(outputs) == len(ranks), f"{text}: {len(ranks)} operands"
    whole: set[str] = set()
    summed: set[str] = set()
    operands = [
        _operand(text, o, rank, whole, summed) for o, rank in zip([*inputs, *outputs], ranks, strict=True)
    ]
    split = len(inputs)
    any_part = tuple(n for n, o in enumerate(outputs) if o == "*")
    return Equation(
        tuple(operands[:split]), tuple(operands[split:]), frozenset(whole), frozenset(summed), any_part
    )


def _operand(text: str, operand: str, rank: int, whole: set[str], summed: set[str]) -> tuple[str | None, ...]:
    if operand in ("-", "*"):
        return (None,) * rank
    names: list[str | None] = []
    for token in operand.split():
        bare = token.rstrip("!+")
        if token.endswith("!"):
            whole.add(bare)
        if token.endswith("+"):
            summed.add(bare)
        names.append(None if bare == "1" else bare)
    if "..." in names:
        at = names.index("...")
        free = rank - (len(names) - 1)
        names[at : at + 1] = [f".{n}" for n in reversed(range(free))]
    assert len(names) == rank, f"{text}: operand {operand} of rank {rank}"
    return tuple(names)


Derivation = Callable[[list[Shape], list[Shape], Mapping], "str | None"]


def _names(rank: int, marked: Collection[int] = (), mark: str = "!") -> list[str]:
    """Example: `_names(3, {1})` is [x0, x1!, x2]."""
    return [f"x{n}{mark if n in marked else ''}" for n in range(rank)]


def _equation(inputs: Iterable[list[str]], outputs: Iterable[list[str]]) -> str:
    left, right = (", ".join(" ".join(names) or "-" for names in side) for side in (inputs, outputs))
    return f"{left} -> {right}"


def elementwise(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str:
    """Broadcast from the right; a broadcast dimension of size one stays whole.

    Example: (4, 8) and (8,) to (4, 8) is `x1 x0, x0 -> x1 x0`.
    """
    result = outputs[0][::-1]

    def operand(shape: Shape) -> list[str]:
        sizes = zip(shape[::-1], result, strict=False)
        return [f"x{n}" if size == full != 1 else "1" for n, (size, full) in enumerate(sizes)][::-1]

    return _equation(map(operand, inputs), map(operand, outputs))


def view(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Dimensions that it keeps, splits or joins are matched from the left by their products.

    Example: (4, 8, 6) to (32, 6) is `x0 inner! x2 -> x0 x2`: the 32 is cut where the 4 is.
    """
    if not len(inputs) == len(outputs) == 1:
        return None
    (source,), (target,) = inputs, outputs
    left: list[str] = []
    right: list[str] = []
    i = j = 0
    while i < len(source) or j < len(target):
        a, b = list(source[i : i + 1]), list(target[j : j + 1])
        i, j = i + len(a), j + len(b)
        while math.prod(a) != math.prod(b):
            if math.prod(a) < math.prod(b) and i < len(source):
                a.append(source[i])
                i += 1
            elif j < len(target):
                b.append(target[j])
                j += 1
            else:
                return "- -> -"
        shared = f"x{len(left)}"
        left += _block(a, shared)
        right += _block(b, shared)
    return _equation([left], [right])


def _block(sizes: list[int], shared: str) -> list[str]:
    """Names of the dimensions of one side of a matched block. Only the slowest one of size > 1 is shared."""
    names: list[str] = []
    for size in sizes:
        names.append("1" if size == 1 else "inner!" if shared in names else shared)
    return names


def squeeze(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """A dimension in `dim` stays whole: if a part had size one there, squeeze would remove it."""
    rank = len(inputs[0])
    dims = attributes.get("dim", range(rank))
    named = {d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)}
    source = _names(rank, named)
    target = [source[n] for n in range(rank) if n not in named or inputs[0][n] != 1]
    return _equation([source], [target])


def unflatten(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """The dimension that is split stays whole, because the new sizes are arguments."""
    rank, dim = len(inputs[0]), attributes.get("dim")
    if dim is None:
        return None
    dim %= rank
    source = _names(rank, {dim})
    split = [f"y{n}!" for n in range(len(outputs[0]) - rank + 1)]
    return _equation([source], [source[:dim] + split + source[dim + 1 :]])


def permute(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """`dims`: the order for a permute; two dimensions to swap for a transpose (`swap` true)."""
    rank, dims = len(inputs[0]), attributes.get("dims")
    if dims is None:
        return "x0 x1 -> x1 x0" if rank == 2 else None
    order = [d % rank for d in dims]
    if attributes.get("swap"):
        first, second = order
        order = list(range(rank))
        order[first], order[second] = second, first
    return _equation([_names(rank)], [[f"x{d}" for d in order]])


def along(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str:
    """An op that works along `dim`, by default the first (cat, stack, split, slice, softmax, and the backward
    of slice and select): every other dimension may be cut. Inputs or outputs may lack the dimension, or have
    another size there."""
    rank = max(map(len, (*inputs, *outputs)))
    dim = attributes.get("dim", 0) % max(rank, 1)
    names = _names(rank, {dim})

    def operand(shape: Shape) -> list[str]:
        if len(shape) == rank:
            return names
        return names[:dim] + names[dim + 1 :] if len(shape) == rank - 1 else []

    return _equation(map(operand, inputs), map(operand, outputs))


def gather(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Inputs: source (of scatter: target), index, perhaps what is scattered. Dimensions other than `dim` may
    be cut if all have the same size there."""
    if len(inputs) < 2 or "dim" not in attributes or len({*map(len, inputs)}) > 1:
        return None
    dim = attributes["dim"] % max(len(inputs[0]), 1)
    sizes = enumerate(zip(*inputs, strict=True))
    names = _names(len(inputs[0]), [n for n, of_all in sizes if n == dim or len({*of_all}) > 1])
    return _equation([names] * len(inputs), [names])


def top_k(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Values and indices of the largest along `dim`, by default the last: others may be cut."""
    rank = len(inputs[0])
    names = _names(rank, {attributes.get("dim", -1) % max(rank, 1)})
    return _equation([names], [names] * len(outputs))


def last_two(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """An op on matrices (tril): all dimensions but the last two may be cut."""
    return "... r! c! -> ... r! c!" if len(inputs) == 1 and len(inputs[0]) >= 2 else None


def repeat(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Dimensions that are not repeated may be cut."""
    rank = len(outputs[0])
    shift = rank - len(inputs[0])
    before = (None,) * shift + inputs[0]
    names = _names(rank, [n for n in range(rank) if before[n] != outputs[0][n]])
    return _equation([names[shift:]], [names])


def pad(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """`pad`: (before, after) from the last dimension on; those that are not padded may be cut."""
    sizes, rank = attributes.get("pad"), len(inputs[0])
    if sizes is None:
        return None
    names = _names(rank, {rank - 1 - n // 2 for n, size in enumerate(sizes) if size})
    return _equation([names], [names])


def _reduce(mark: str) -> Derivation:
    """A reduction over `dims` or `dim`; `mark` is the mark of the reduced dimensions in the equation."""

    def derivation(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
        rank, dims = len(inputs[0]), attributes.get("dims", attributes.get("dim"))
        if dims is None or len(inputs) != 1:
            return None
        dims = [dims] if isinstance(dims, int) else dims or range(rank)
        reduced = {d % max(rank, 1) for d in dims}
        source = _names(rank, reduced, mark)
        keepdim = len(outputs[0]) == rank
        target = ["1" if n in reduced else f"x{n}" for n in range(rank) if keepdim or n not in reduced]
        return _equation([source], [target] * len(outputs))

    return derivation


sums, reduces = _reduce("+"), _reduce("!")


def norm(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """A norm over the last dimensions, those of `normalized_shape` (by default one). The optional weight and
    bias stay whole."""
    rank, normalized = len(inputs[0]), len(attributes.get("normalized_shape", "D"))
    free = rank - normalized
    names = _names(rank, range(free, rank))
    statistics = [*names[:free], *["1"] * normalized]
    return _equation(
        [names] + [names[free:]] * (len(inputs) - 1), [names] + [statistics] * (len(outputs) - 1)
    )


def attention(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """query, key, value, optional mask or chosen keys -> result, logsumexp, and others for the backward.

    None with dropout, because random numbers must not depend on how the batch is cut. Without dropout, the
    others (seeds) are unused, so those of any part will do.
    """
    if len(inputs) not in (3, 4) or any(len(s) != 4 for s in inputs[:3]) or attributes.get("dropout_p"):
        return None
    same_heads = inputs[0][1] == inputs[1][1] == inputs[2][1]
    heads = "h" if same_heads else "h!"
    query = ["b", heads, "s!", "d!"]
    shared = ["b", heads if same_heads else "g!"]
    operands = [query, [*shared, "t!", "d!"], [*shared, "t!", "e!"]]
    if len(inputs) == 4:
        rank = len(inputs[3])
        operands.append(["b", heads, "s!", "m!"][4 - rank :] if 0 < rank <= 4 else [])
    results = [["b", heads, "s!", "e!"]]
    for shape in outputs[1:]:
        is_logsumexp = len(results) == 1 and len(shape) >= 3
        results.append(["b", heads, "l!", "1"][: len(shape)] if is_logsumexp else ["*"])
    return _equation(operands, results)


def attention_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Gradient of the result, query, key, value, further results of the forward, optional mask -> gradients.

    Operands are recognized by shape: those with four dimensions start with batch and heads, as does a
    logsumexp with three. None if the mask needs a gradient, or with dropout, as in the forward.
    """
    whole = [s for s in inputs if len(s) == 4]
    if attributes.get("dropout_p") or len(whole) < 3 or any(len(s) != 4 for s in outputs) or len(outputs) > 3:
        return None
    batch, most_heads = whole[0][0], max(s[1] for s in whole)
    same_heads = all(s[1] in (1, most_heads) for s in whole)
    heads = ["h" if same_heads else "h!" if n == 0 else "g!" for n in range(2)]

    def operand(shape: Shape) -> list[str]:
        leads = len(shape) >= 3 and shape[0] in (1, batch)
        if len(shape) == 4 and leads:
            return ["b", heads[shape[1] != most_heads], "x!", "y!"]
        if len(shape) == 3 and leads and shape[:2] == (batch, whole[0][1]):
            return ["b", heads[shape[1] != most_heads], "l!"]
        return ["m!"] * len(shape)

    return _equation([operand(s) for s in inputs], [operand(s) for s in outputs])


def recurrence(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str:
    """Operands of three and more dimensions, the first of which is the batch, and parameters, which have
    fewer -> results alike. Gradients of parameters are sums over the batch."""

    def operand(shape: Shape, side: str, mark: str) -> list[str]:
        names = [f"{side}{axis}!" for axis in range(len(shape))]
        return [f"b{mark}", *names[1:]] if len(shape) >= 3 else names

    mark = "+" if any(len(shape) < 3 for shape in outputs) else ""
    return _equation(
        [operand(shape, f"i{n}x", mark) for n, shape in enumerate(inputs)],
        [operand(shape, f"o{n}x", "") for n, shape in enumerate(outputs)],
    )


def norm_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str:
    """Gradient of the result, input, statistics, weight and bias -> gradients of the input, and (partial
    sums) of weight and bias. Operands are recognized by shape, because gradients that are not needed are
    missing. Cut along the first dimension only: torch assumes that the statistics are contiguous."""
    shape, normalized = inputs[0], len(attributes.get("normalized_shape", "D"))
    free = len(shape) - normalized
    names = [f"x{n}" + ("+" if n == 0 < free else "!") for n in range(len(shape))]

    def operand(of: Shape) -> list[str]:
        if len(of) == len(shape):
            return [name if size == full else "1" for name, size, full in zip(names, of, shape, strict=True)]
        return names[free:] if of == shape[free:] else [f"y{n}!" for n in range(len(of))]

    return _equation([operand(s) for s in inputs], [operand(s) for s in outputs])


def nll_loss(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """log p[T, V] (or [B, V, ...]), target[T] (, weight[V]) -> loss, total weight. Losses and weights are
    sums over parts; with `reduction` 0 there is a loss for each target and no total weight."""
    if len(inputs[0]) < 2:
        return None
    mark = "+" if attributes.get("reduction", 1) else ""
    target = [f"t{n}{mark if n == 0 else '!'}" for n in range(len(inputs[1]))]
    weight = [["v!"]] * (len(inputs) - 2)
    results = [["*"]] if not mark else [[]]
    return _equation(
        [[target[0], "v!", *target[1:]], target, *weight], [target if not mark else [], *results]
    )


def nll_loss_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Gradient of the loss, log p, target (, weight), total weight of the whole -> gradient of log p."""
    if len(inputs[1]) < 2:
        return None
    target = [f"t{n}" + ("!" if n else "") for n in range(len(inputs[2]))]
    gradient = target if inputs[0] else []
    weight = [["v!"]] * (len(inputs) - 4)
    scores = [target[0], "v!", *target[1:]]
    return _equation([gradient, scores, target, *weight, []], [scores])


def embedding(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str:
    """table[V, D], index[...] -> rows[..., D]. With `scale_grad_by_freq` not along the index, for the sake of
    the gradient (`embedding_backward`)."""
    mark = "!" if attributes.get("scale_grad_by_freq") else ""
    index = [f"x{n}{mark}" for n in range(len(inputs[1]))]
    return _equation([["v!", "d"], index], [[*index, "d"]])


def embedding_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """gradient[..., D], index[...] -> gradient of the table[V, D], a sum over all indices.

    None with `scale_grad_by_freq`: a part does not know how often an index appears in the others.
    """
    if attributes.get("scale_grad_by_freq") or len(inputs) != 2:
        return None
    index = [f"x{n}+" for n in range(len(inputs[1]))]
    return _equation([[*index, "d"], index], [["v!", "d"]])


def fused_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """The backward launch of fused experts, and the weight gradients that it computes as fillers: cut along
    the tokens, which are the first dimension of all operands but the ticket and the experts' parameters.
    Behind the fillers' operands may come the forward's x."""
    tokens = inputs[0][0]
    parameters = 2 if len(inputs[4]) == 3 else 4
    fillers = inputs[3 + parameters :]
    if any(shape[0] != tokens for shape in fillers):
        return None
    left = [["t+", "d!"], [], ["t+", "k!"], *([] for _ in range(parameters))]
    left += [["t+", f"a{n}!"] for n in range(len(fillers))]
    right = [["t", "d!"], ["t", "k!"]]
    right += [[f"r{n}x{axis}!" for axis in range(len(shape))] for n, shape in enumerate(outputs[2:], 2)]
    return _equation(left, right)
