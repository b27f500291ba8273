"""Equations that depend on an op's shapes and attributes: views, reductions, attention, norms, ...

Each function takes the shapes of an instruction's inputs (every tensor once) and outputs, and its attributes,
and returns its equation (`graph.rules.equations`), or None if the instruction cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lancet_kernels.graph.rules import equations
from lancet_kernels.graph.rules.equations import Shape

Derivation = Callable[[list[Shape], list[Shape], Mapping], "str | None"]


def _elementwise(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str:
    return equations.elementwise(inputs, outputs)


def _view(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    return equations.view(inputs[0], outputs[0]) if len(inputs) == len(outputs) == 1 else None


def _squeeze(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """A dimension in `dim` stays whole: if a part had size one there, squeeze would remove it."""
    rank = len(inputs[0])
    dims = attributes.get("dim", range(rank))
    named = {d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)}
    source = [f"x{n}{'!' if n in named else ''}" for n in range(rank)]
    target = [source[n] for n in range(rank) if n not in named or inputs[0][n] != 1]
    return _equation([source], [target])


def _unflatten(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """The dimension that is split stays whole, because the new sizes are arguments."""
    rank, dim = len(inputs[0]), attributes.get("dim")
    if dim is None:
        return None
    dim %= rank
    source = [f"x{n}" for n in range(rank)]
    split = [f"y{n}!" for n in range(len(outputs[0]) - rank + 1)]
    return _equation(
        [[*source[:dim], source[dim] + "!", *source[dim + 1 :]]], [source[:dim] + split + source[dim + 1 :]]
    )


def _permute(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """`dims`: the order for a permute; two dimensions to swap for a transpose (`swap` true)."""
    rank, dims = len(inputs[0]), attributes.get("dims")
    if dims is None:
        return equations.permute(2, (1, 0)) if rank == 2 else None
    order = [d % rank for d in dims]
    if attributes.get("swap"):
        first, second = order
        order = list(range(rank))
        order[first], order[second] = second, first
    return equations.permute(rank, order)


def _along(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """An op that works along `dim`, by default the first."""
    return equations.along(inputs, outputs, attributes.get("dim", 0))


def _stack(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """An op that adds the dimension `dim` (by default the first); every other one may be cut."""
    rank = len(inputs[0])
    dim = attributes.get("dim", 0) % (rank + 1)
    names = [f"x{n}" for n in range(rank)]
    return _equation([names] * len(inputs), [[*names[:dim], "new!", *names[dim:]]])


def _gather(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Inputs: source and index. Dimensions other than `dim` may be cut if both have the same size there."""
    if len(inputs) != 2 or "dim" not in attributes or len(inputs[0]) != len(inputs[1]):
        return None
    dim = attributes["dim"] % max(len(inputs[0]), 1)
    sizes = enumerate(zip(*inputs, strict=True))
    names = [f"x{n}" + ("!" if n == dim or a != b else "") for n, (a, b) in sizes]
    return _equation([names, names], [names])


def _last_two(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """An op on matrices (tril): all dimensions but the last two may be cut."""
    return "... r! c! -> ... r! c!" if len(inputs) == 1 and len(inputs[0]) >= 2 else None


def _repeat(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Dimensions that are not repeated may be cut."""
    rank, sizes = len(outputs[0]), outputs[0]
    shift = rank - len(inputs[0])
    names = [f"x{n}" + ("" if n >= shift and inputs[0][n - shift] == sizes[n] else "!") for n in range(rank)]
    return _equation([names[shift:]], [names])


def _pad(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """`pad`: (before, after) from the last dimension on; those that are not padded may be cut."""
    pad = attributes.get("pad")
    if pad is None:
        return None
    rank = len(inputs[0])
    padded = {rank - 1 - n for n in range(len(pad) // 2) if pad[2 * n] or pad[2 * n + 1]}
    names = [f"x{n}" + ("!" if n in padded else "") for n in range(rank)]
    return _equation([names], [names])


def _reduce(mark: str) -> Derivation:
    """A reduction over `dims` or `dim`; `mark` is the mark of the reduced dimensions in the equation."""

    def write(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
        rank, dims = len(inputs[0]), attributes.get("dims", attributes.get("dim"))
        if dims is None or len(inputs) != 1:
            return None
        dims = [dims] if isinstance(dims, int) else dims or range(rank)
        reduced = {d % max(rank, 1) for d in dims}
        source = [f"x{n}{mark if n in reduced else ''}" for n in range(rank)]
        keepdim = len(outputs[0]) == rank
        target = ["1" if n in reduced else f"x{n}" for n in range(rank) if keepdim or n not in reduced]
        return _equation([source], [target] * len(outputs))

    return write


def _norm(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """A norm over the last dimensions, those of `normalized_shape` (by default one). The optional weight and
    bias stay whole."""
    rank, normalized = len(inputs[0]), len(attributes.get("normalized_shape", "D"))
    free = rank - normalized
    names = [f"x{n}" + ("!" if n >= free else "") for n in range(rank)]
    statistics = [*names[:free], *["1"] * normalized]
    return _equation(
        [names] + [names[free:]] * (len(inputs) - 1), [names] + [statistics] * (len(outputs) - 1)
    )


def _attention(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """query, key, value, optional mask -> result, logsumexp, and further values for the backward.

    None with dropout, because random numbers must not depend on how the batch is cut. Without dropout, the
    further values (seeds) are unused, so those of any part will do.
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
        operands.append(["b", heads, "s!", "t!"][4 - rank :] if 0 < rank <= 4 else [])
    results = [["b", heads, "s!", "e!"]]
    for shape in outputs[1:]:
        is_logsumexp = len(results) == 1 and len(shape) >= 3
        results.append(["b", heads, "l!", "1"][: len(shape)] if is_logsumexp else ["*"])
    return _equation(operands, results)


def _attention_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
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


def _norm_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str:
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


def _nll_loss(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
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


def _nll_loss_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """Gradient of the loss, log p, target (, weight), total weight of the whole -> gradient of log p."""
    if len(inputs[1]) < 2:
        return None
    target = [f"t{n}" + ("!" if n else "") for n in range(len(inputs[2]))]
    gradient = target if inputs[0] else []
    weight = [["v!"]] * (len(inputs) - 4)
    scores = [target[0], "v!", *target[1:]]
    return _equation([gradient, scores, target, *weight, []], [scores])


def _embedding_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """gradient[..., D], index[...] -> gradient of the table[V, D], a sum over all indices.

    None with `scale_grad_by_freq`: a part does not know how often an index appears in the others.
    """
    if attributes.get("scale_grad_by_freq") or len(inputs) != 2:
        return None
    index = [f"x{n}+" for n in range(len(inputs[1]))]
    return _equation([[*index, "d"], index], [["v!", "d"]])


def _put_back(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
    """The backward of slice and select along `dim`: the gradient, padded with zeros."""
    rank = len(outputs[0])
    if "dim" not in attributes or len(inputs) != 1:
        return None
    dim = attributes["dim"] % rank
    names = [f"x{n}" + ("!" if n == dim else "") for n in range(rank)]
    return _equation([names if len(inputs[0]) == rank else names[:dim] + names[dim + 1 :]], [names])


def _fused_backward(inputs: list[Shape], outputs: list[Shape], attributes: Mapping) -> str | None:
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
    right = [["t", "d!"], ["t", "k!"], *([f"r{n}!", f"c{n}!"] for n in range(len(outputs) - 2))]
    for n, shape in enumerate(outputs[2:], 2):
        right[n] = [f"r{n}x{axis}!" for axis in range(len(shape))]
    return _equation(left, right)


def _equation(inputs: list[list[str]], outputs: list[list[str]]) -> str:
    left, right = (", ".join(" ".join(names) or "-" for names in side) for side in (inputs, outputs))
    return f"{left} -> {right}"


DERIVED: dict[str, Derivation] = {
    "elementwise": _elementwise,
    "view": _view,
    "squeeze": _squeeze,
    "unflatten": _unflatten,
    "permute": _permute,
    "along": _along,
    "stack": _stack,
    "gather": _gather,
    "last_two": _last_two,
    "repeat": _repeat,
    "pad": _pad,
    "attention_backward": _attention_backward,
    "norm_backward": _norm_backward,
    "nll_loss": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "embedding_backward": _embedding_backward,
    "put_back": _put_back,
    "fused_backward": _fused_backward,
    "sum": _reduce("+"),
    "reduce": _reduce("!"),
    "norm": _norm,
    "attention": _attention,
}
