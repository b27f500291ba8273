"""For every op of the rule table: how to call it, on operands of drawn shapes.

B, S, H, D, ... are drawn sizes. A sample is (target, arguments, keyword arguments).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

import lancet_kernels.ops  # noqa: F401  (registers torch.ops.lancet)

aten, lancet = torch.ops.aten, torch.ops.lancet


class Draw:
    """Draws sizes and makes operands, in fp64."""

    def __init__(self, draw: Callable) -> None:
        self._draw = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def size(self, least: int = 1, most: int = 6) -> int:
        return self._draw(st.integers(least, most))

    def shape(self, least: int = 1, most: int = 4) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self._draw(st.integers(least, most))))

    def one_of(self, *choices: object) -> object:
        return self._draw(st.sampled_from(choices))

    def real(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def whole(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def flag(self, *shape: int) -> Tensor:
        return self.whole(2, *shape).bool()

    def dim(self, rank: int) -> int:
        return self._draw(st.integers(-rank, rank - 1))

    def order(self, rank: int) -> list[int]:
        return self._draw(st.permutations(range(rank)))

    def stretched(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`: leading dimensions left out, some of size one."""
        kept = shape[self._draw(st.integers(0, len(shape))) :]
        return tuple(n if self._draw(st.booleans()) else 1 for n in kept)


Sample = tuple[Callable, tuple, dict]
Make = Callable[[Draw], Sample]

OPERANDS: dict[str, Callable[[Draw, tuple[int, ...]], object]] = {
    "full": lambda d, shape: d.real(*shape),
    "stretched": lambda d, shape: d.real(*d.stretched(shape)),
    "flags": lambda d, shape: d.flag(*shape),
    "mask": lambda d, shape: d.flag(*d.stretched(shape)),
    "sizes": lambda d, shape: list(shape),
    "dim": lambda d, shape: d.dim(len(shape)),
    "new dim": lambda d, shape: d.dim(len(shape) + 1),
    "order": lambda d, shape: d.order(len(shape)),
    "few": lambda d, shape: d.size(1, 3),
    "times": lambda d, shape: [d.size(1, 2) for _ in range(len(shape) + d.size(0, 1))],
    "pads": lambda d, shape: [d.size(0, 2) for _ in range(2 * d.size(1, len(shape)))],
    "diagonal": lambda d, shape: d.size(-1, 1),
    "two": lambda d, shape: [d.real(*shape), d.real(*shape)],
}
"""Arguments that depend on the drawn shape."""


def _shaped(
    target: Callable,
    *arguments: object,
    ranks: tuple[int, int] = (1, 4),
    swap: bool = False,
    **by_name: object,
) -> Make:
    """An op on one drawn shape. Args: arguments: names among `OPERANDS`, or what is given as it stands. swap:
    the arguments may come in the other order."""

    def make(d: Draw) -> Sample:
        shape = d.shape(*ranks)
        given = [OPERANDS[a](d, shape) if isinstance(a, str) else a for a in arguments]
        if swap and d.one_of(True, False):
            given.reverse()
        return target, tuple(given), by_name

    return make


def _each(ops: str, *arguments: object, **options: object) -> dict[str, Make]:
    """Several ops on one drawn shape, by name."""
    samples = {}
    for op in ops.split():
        packet = getattr(aten, op)
        overload = next(o for o in ("Tensor", "Tensor_Tensor", "default", "int") if o in packet.overloads())
        samples[f"aten.{op}"] = _shaped(getattr(packet, overload), *arguments, **options)
    return samples


def _product(target: Callable, *operands: str | tuple[str, ...]) -> Make:
    """An op on operands with the dimensions of these letters. A tuple: one of several."""

    def make(d: Draw) -> Sample:
        sizes = {"1": 1}

        def operand(axes: str) -> Tensor:
            for axis in axes:
                if axis not in sizes:
                    sizes[axis] = d.size()
            return d.real(*(sizes[axis] for axis in axes))

        return target, tuple(operand(o if isinstance(o, str) else d.one_of(*o)) for o in operands), {}

    return make


def _view(op: str) -> Make:
    """Dimensions joined, split, or put in and out at random: all factorings of one count."""

    def make(d: Draw) -> Sample:
        factors = [d.one_of(1, 2, 2, 3, 4) for _ in range(d.size(1, 5))]

        def grouped() -> list[int]:
            sizes = [1]
            for factor in factors:
                if d.one_of(True, False):
                    sizes.append(1)
                sizes[-1] *= factor
            return sizes

        return getattr(aten, op).default, (d.real(*grouped()), grouped()), {}

    return make


def _squeeze(d: Draw) -> Sample:
    shape = d.shape()
    x, dims = d.real(*shape), sorted({d.dim(len(shape)) % len(shape) for _ in range(2)})
    ways = (aten.squeeze.default, (x,)), (aten.squeeze.dim, (x, dims[0])), (aten.squeeze.dims, (x, dims))
    return (*d.one_of(*ways), {})


def _flatten(d: Draw) -> Sample:
    shape = d.shape()
    first, last = sorted(d.dim(len(shape)) % len(shape) for _ in range(2))
    return aten.flatten.using_ints, (d.real(*shape), first, last), {}


def _unflatten(d: Draw) -> Sample:
    shape = list(d.shape())
    dim, sizes = d.dim(len(shape)), [d.size(1, 3), d.size(1, 4)]
    shape[dim] = sizes[0] * sizes[1]
    return aten.unflatten.int, (d.real(*shape), dim, sizes), {}


def _cat(d: Draw) -> Sample:
    shape = list(d.shape())
    dim, other = d.dim(len(shape)), list(shape)
    other[dim] = d.size()
    tensors = [d.real(*shape), d.real(*other)]
    return aten.cat.default, (tensors, dim) if dim % len(shape) or d.one_of(True, False) else (tensors,), {}


def _split_with_sizes(d: Draw) -> Sample:
    shape = list(d.shape())
    dim, sizes = d.dim(len(shape)), [d.size(1, 3), d.size(1, 3)]
    shape[dim] = sum(sizes)
    return aten.split_with_sizes.default, (d.real(*shape), sizes, dim), {}


def _slice(d: Draw) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    first = d.size(0, shape[dim] - 1)
    behind = d.size(first + 1, shape[dim] + 2)
    return aten.slice.Tensor, (d.real(*shape), dim, first, behind, d.size(1, 2)), {}


def _select(d: Draw) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    return aten.select.int, (d.real(*shape), dim, d.size(-shape[dim], shape[dim] - 1)), {}


def _reduction(target: Callable, *, one_dim: bool = False) -> Make:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        dims = sorted({d.dim(len(shape)) % len(shape) for _ in range(d.size(1, len(shape)))})
        keep = d.one_of(True, False)
        x = d.real(*shape)
        if "correction" in str(target):
            return target, (x, dims), {"correction": 0, "keepdim": keep}
        return target, (x, dims[0] if one_dim else dims, keep), {}

    return make


def _sum(d: Draw) -> Sample:
    everything = _shaped(aten.sum.default, "full"), _shaped(aten.sum.dim_IntList, "full", [])
    some = _reduction(aten.sum.dim_IntList)
    return d.one_of(*everything, some, some, some, some)(d)


def _gather(d: Draw) -> Sample:
    shape = list(d.shape())
    dim, index = d.dim(len(shape)), list(shape)
    index[dim] = d.size()
    if d.one_of(True, False):
        other = d.dim(len(shape))
        index[other] = d.size(1, shape[other])
    return aten.gather.default, (d.real(*shape), dim, d.whole(shape[dim], *index)), {}


def _scatter(d: Draw) -> Sample:
    _, (target, dim, index), _ = _gather(d)
    if d.one_of(True, False):
        return aten.scatter.value, (target, dim, index, 0.5), {}
    return aten.scatter.src, (target, dim, index, d.real(*index.shape)), {}


def _scatter_add(d: Draw) -> Sample:
    _, (target, dim, index), _ = _gather(d)
    return aten.scatter_add.default, (target, dim, index, d.real(*index.shape)), {}


def _top_k(d: Draw) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    place = () if dim == len(shape) - 1 else (dim,)
    return aten.topk.default, (d.real(*shape), d.size(1, shape[dim]), *place), {}


def _embedding(d: Draw) -> Sample:
    rows = d.size(2, 9)
    return aten.embedding.default, (d.real(rows, d.size()), d.whole(rows, *d.shape(1, 3))), {}


def _linear(d: Draw) -> Sample:
    shape, f = d.shape(1, 4), d.size()
    bias = (d.real(f),) if d.one_of(True, False) else ()
    return aten.linear.default, (d.real(*shape), d.real(f, shape[-1]), *bias), {}


def _normalized(d: Draw) -> tuple[tuple[int, ...], list[int], Tensor | None, Tensor | None]:
    """A shape, its dimensions that are normalized, optional weight and bias."""
    shape = d.shape(2, 4)
    normalized = list(shape[d.size(1, len(shape) - 1) :])
    weight = d.real(*normalized) if d.one_of(True, False) else None
    bias = d.real(*normalized) if weight is not None and d.one_of(True, False) else None
    return shape, normalized, weight, bias


def _norm(op: str) -> Make:
    def make(d: Draw) -> Sample:
        shape, normalized, weight, bias = _normalized(d)
        rest = {"native_layer_norm": (bias, 1e-5), "layer_norm": (bias,)}.get(op, (1e-6,))
        return getattr(aten, op).default, (d.real(*shape), normalized, weight, *rest), {}

    return make


def _norm_backward(d: Draw) -> Sample:
    shape, normalized, weight, bias = _normalized(d)
    statistics = [*shape[: len(shape) - len(normalized)], *[1] * len(normalized)]
    asked = [True, weight is not None, bias is not None]
    operands = d.real(*shape), d.real(*shape), normalized, d.real(*statistics), d.real(*statistics)
    return aten.native_layer_norm_backward.default, (*operands, weight, bias, asked), {}


def _attended(d: Draw, *masks: str) -> tuple[list[Tensor], bool, Tensor | None]:
    """Query, key and value; causal or not; an optional mask."""
    sizes = {axis: d.size() for axis in "bhsta"} | {"1": 1}

    def operand(axes: str) -> Tensor:
        return d.real(*(sizes[axis] for axis in axes))

    causal = d.one_of(True, False)
    masked = not causal and d.one_of(True, False)
    mask = operand(d.one_of("bhst", "b1st", "11st", *masks)) if masked else None
    return [operand(axes) for axes in ("bhsa", "bhta", "bhta")], causal, mask


def _attention(d: Draw) -> Sample:
    (query, key, value), causal, mask = _attended(d, "st")
    shares_heads = d.one_of(True, False) and query.shape[1] % 2 == 0
    if shares_heads:
        key, value = (x[:, : x.shape[1] // 2] for x in (key, value))
    operands = query, key, value, mask, 0.0, causal
    return aten.scaled_dot_product_attention.default, operands, {"enable_gqa": True} if shares_heads else {}


def _cpu_attention(d: Draw) -> Sample:
    operands, causal, mask = _attended(d)
    by_name = {} if mask is None else {"attn_mask": mask}
    return aten._scaled_dot_product_flash_attention_for_cpu.default, (*operands, 0.0, causal), by_name


def _attention_backward(d: Draw) -> Sample:
    forward, (*operands, dropout, causal), by_name = _cpu_attention(d)
    result, logsumexp = forward(*operands, dropout, causal, **by_name)
    operands = d.real(*result.shape), *operands, result, logsumexp, dropout, causal
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, operands, by_name


def _loss(d: Draw, op: str) -> tuple:
    """log p, targets, weights of classes; some targets are ignored (-100), never all."""
    behind = () if op == "nll_loss" else (d.size(), d.size())
    batch, classes = d.size(), d.size(2, 5)
    target = d.whole(classes, batch, *behind)
    target[1:] = torch.where(d.flag(*target[1:].shape), target[1:], -100)
    weight = d.real(classes).abs() + 0.1 if d.one_of(True, False) else None
    return d.real(batch, classes, *behind), target, weight, d.one_of(0, MEAN, SUM), -100


MEAN, SUM = 1, 2


def _nll_loss(op: str) -> Make:
    return lambda d: (getattr(aten, f"{op}_forward").default, _loss(d, op), {})


def _nll_loss_backward(op: str) -> Make:
    def make(d: Draw) -> Sample:
        forward, loss, _ = _nll_loss(op)(d)
        result, total = forward(*loss)
        return getattr(aten, f"{op}_backward").default, (d.real(*result.shape), *loss, total), {}

    return make


def _embedding_backward(d: Draw) -> Sample:
    rows, shape = d.size(2, 9), d.shape(1, 3)
    operands = d.real(*shape, d.size()), d.whole(rows, *shape), rows, -1, d.one_of(True, False)
    return aten.embedding_dense_backward.default, operands, {}


def _slice_backward(d: Draw) -> Sample:
    shape = list(d.shape())
    dim = d.dim(len(shape))
    piece, first = list(shape), d.size(0, shape[dim] - 1)
    piece[dim] -= first
    return aten.slice_backward.default, (d.real(*piece), shape, dim, first, shape[dim], 1), {}


def _select_backward(d: Draw) -> Sample:
    shape = list(d.shape())
    dim = d.dim(len(shape)) % len(shape)
    piece = shape[:dim] + shape[dim + 1 :]
    return aten.select_backward.default, (d.real(*piece), shape, dim, d.size(0, shape[dim] - 1)), {}


def _log_sigmoid_backward(d: Draw) -> Sample:
    x = d.real(*d.shape())
    _, buffer = aten.log_sigmoid_forward.default(x)
    return aten.log_sigmoid_backward.default, (d.real(*x.shape), x, buffer), {}


def _gate_backward(d: Draw) -> Sample:
    tokens, experts = d.size(1, 9), d.size(2, 5)
    spec = d.one_of("switch", "topk", "sigmoid")
    choices = 1 if spec == "switch" else d.size(1, 2)
    expert = torch.stack([torch.randperm(experts, generator=d.generator)[:choices] for _ in range(tokens)])
    operands = d.real(tokens, choices), d.real(tokens, experts), expert, spec
    return lancet.gate_backward.default, operands, {}


def _gate(d: Draw) -> Sample:
    spec, keyed = d.one_of(
        ("switch", False), ("topk", False), ("sigmoid", False), ("hash", True), ("random", True)
    )
    tokens, experts = d.size(1, 9), d.size(2, 5)
    top_k = 1 if spec == "switch" else d.size(1, 2)
    logits = None if keyed else d.real(tokens, experts)
    key = d.whole(50, tokens) if keyed else None
    bias = d.real(experts) if spec == "sigmoid" else None
    used = d.whole(3, experts)
    real = d.one_of(None, d.whole(2, tokens, 1).bool())
    return lancet.gate.default, (logits, used, key, bias, spec, top_k, d.size(1, 4), real), {}


def _assign_slots(d: Draw) -> Sample:
    experts = d.size(2, 5)
    choices = d.whole(experts, d.size(1, 9), d.size(1, 3))
    return lancet.assign_slots.default, (choices, d.whole(3, experts)), {}


def _dropout(d: Draw) -> Sample:
    *tokens, width = d.shape()
    element = d.whole(1000, *tokens), d.whole(1000, width)
    return lancet.dropout.default, (d.real(*tokens, width), *element, d.whole(9), 0.5, 1, d.size()), {}


class Experts:
    """Rows of an MoE layer: W ranks, L experts each, counts of rows."""

    def __init__(self, d: Draw) -> None:
        self.local, self.width, self.hidden = d.size(1, 3), d.size(1, 5), 2 * d.size(1, 3)
        self.counts = d.whole(9, d.size(1, 2), self.local)
        self.counts[0, 0] += 1
        self.d = d

    def operand(self, what: str) -> object:
        """counts; x, h: rows; w, b: parameters."""
        if what == "counts":
            return self.counts
        rows, local = int(self.counts.sum()), self.local
        shapes = {"x": (rows, self.width), "h": (rows, self.hidden), "b": (local, self.hidden)}
        return self.d.real(*shapes.get(what, (local, self.width, self.hidden)))


def _experts(target: Callable, operands: str) -> Make:
    def make(d: Draw) -> Sample:
        e = Experts(d)
        return target, tuple(e.operand(what) for what in operands.split()), {}

    return make


def _all_to_all(d: Draw) -> Sample:
    counts = Experts(d).counts[:1]
    rows = d.real(int(counts.sum()), d.size(1, 5))
    return lancet.all_to_all.default, (rows, counts, counts.clone(), "", d.one_of(True, False)), {}


def _grouped_gemm(d: Draw) -> Sample:
    target, (*operands, bias), by_name = _experts(lancet.grouped_gemm.default, "x counts w b")(d)
    return target, (*operands, d.one_of(bias, None)), by_name


def _expert_activation(d: Draw) -> Sample:
    target, operands, _ = _experts(lancet.expert_activation.default, "h counts")(d)
    return target, (*operands, d.one_of("gelu", "silu", "swiglu")), {}


def _expert_activation_backward(d: Draw) -> Sample:
    _, (h, counts, kind), _ = _expert_activation(d)
    outer = h.shape[1] // 2 if kind == "swiglu" else h.shape[1]
    return lancet.expert_activation_backward.default, (d.real(h.shape[0], outer), h, counts, kind), {}


SAMPLES: dict[str, Make] = {
    **_each(
        """neg sqrt rsqrt reciprocal square exp exp2 expm1 log log2 log1p sin cos tan tanh sigmoid erf silu
        gelu relu leaky_relu elu hardtanh hardswish softplus abs sign round floor ceil trunc isnan isinf
        zeros_like ones_like clone detach alias lift_fresh_copy log_sigmoid_forward""",
        "full",
    ),
    **_each(
        "add sub mul div pow remainder fmod maximum minimum eq ne lt le gt ge", "full", "stretched", swap=True
    ),
    **_each("logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor", "flags", "mask"),
    **_each("logical_not bitwise_not", "flags"),
    **_each("addcmul addcdiv lerp", "full", "stretched", "full"),
    **_each("full_like", "full", 2.5),
    **_each("_to_copy", "full", dtype=torch.float32),
    **_each("copy", "full", "stretched"),
    **_each("expand", "stretched", "sizes"),
    **_each("unsqueeze", "full", "new dim"),
    **_each("_softmax _log_softmax", "full", "dim", False),
    **_each("softmax log_softmax unbind cumsum", "full", "dim"),
    **_each("_softmax_backward_data _log_softmax_backward_data", "full", "full", "dim", torch.float64),
    **_each("stack", "two", "new dim", ranks=(1, 3)),
    **_each("split chunk", "full", "few", "dim"),
    **_each("permute", "full", "order"),
    **_each("transpose", "full", "dim", "dim"),
    **_each("t", "full", ranks=(1, 2)),
    **_each("tril triu", "full", "diagonal", ranks=(2, 4)),
    **_each("repeat", "full", "times", ranks=(1, 3)),
    **_each("constant_pad_nd", "full", "pads", 1.0),
    **_each("silu_backward sigmoid_backward tanh_backward gelu_backward hardswish_backward", "full", "full"),
    **_each("threshold_backward", "full", "full", 0.0),
    **_each("leaky_relu_backward", "full", "full", 0.1, False),
    **_each("hardtanh_backward", "full", "full", -1.0, 1.0),
    **_each("softplus_backward", "full", "full", 1.0, 20.0),
    **_each("elu_backward", "full", 1.0, 1.0, 1.0, False, "full"),
    "aten.rsub": _shaped(aten.rsub.Scalar, "full", 1.5),
    "aten.clamp": _shaped(aten.clamp.default, "full", -0.5, 0.5),
    "aten.clamp_min": _shaped(aten.clamp_min.default, "full", 0.1),
    "aten.clamp_max": _shaped(aten.clamp_max.default, "full", 0.1),
    "aten.where": _shaped(aten.where.self, "mask", "full", "stretched"),
    "aten.masked_fill": _shaped(aten.masked_fill.Scalar, "full", "mask", -1.5),
    "aten.log_sigmoid_backward": _log_sigmoid_backward,
    **{f"aten.{op}": _view(op) for op in ("view", "reshape", "_unsafe_view")},
    "aten.squeeze": _squeeze,
    "aten.flatten": _flatten,
    "aten.unflatten": _unflatten,
    "aten.cat": _cat,
    "aten.split_with_sizes": _split_with_sizes,
    "aten.slice": _slice,
    "aten.slice_backward": _slice_backward,
    "aten.select": _select,
    "aten.select_backward": _select_backward,
    "aten.gather": _gather,
    "aten.scatter": _scatter,
    "aten.scatter_add": _scatter_add,
    "aten.topk": _top_k,
    "aten.sum": _sum,
    "aten.mean": _reduction(aten.mean.dim),
    **{f"aten.{op}": _reduction(getattr(aten, op).default) for op in ("logsumexp", "amax", "amin")},
    **{f"aten.{op}": _reduction(getattr(aten, op).default, one_dim=True) for op in ("argmax", "argmin")},
    **{f"aten.{op}": _reduction(getattr(aten, op).dim, one_dim=True) for op in ("all", "any")},
    "aten.prod": _reduction(aten.prod.dim_int, one_dim=True),
    **{f"aten.{op}": _reduction(getattr(aten, op).correction) for op in ("var", "std", "var_mean")},
    **{f"aten.{op}": _norm(op) for op in ("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm")},
    "aten.native_layer_norm_backward": _norm_backward,
    "aten.scaled_dot_product_attention": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **{f"aten.{op}_forward": _nll_loss(op) for op in ("nll_loss", "nll_loss2d")},
    **{f"aten.{op}_backward": _nll_loss_backward(op) for op in ("nll_loss", "nll_loss2d")},
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.mm": _product(aten.mm.default, "tk", "kf"),
    "aten.mv": _product(aten.mv.default, "tk", "k"),
    "aten.addmm": _product(aten.addmm.default, ("f", "1f", "tf", "t1", "1"), "tk", "kf"),
    "aten.bmm": _product(aten.bmm.default, "btk", "bkf"),
    "aten.baddbmm": _product(aten.baddbmm.default, ("btf", "1tf", "b1f"), "btk", "bkf"),
    "aten.linear": _linear,
    "lancet.dropout": _dropout,
    "lancet.gate": _gate,
    "lancet.gate_backward": _gate_backward,
    "lancet.assign_slots": _assign_slots,
    "lancet.all_to_all": _all_to_all,
    "lancet.grouped_gemm": _grouped_gemm,
    "lancet.grouped_gemm_dx": _experts(lancet.grouped_gemm_dx.default, "h counts w"),
    "lancet.grouped_gemm_dw": _experts(lancet.grouped_gemm_dw.default, "x h counts"),
    "lancet.grouped_gemm_dbias": _experts(lancet.grouped_gemm_dbias.default, "h counts"),
    "lancet.expert_activation": _expert_activation,
    "lancet.expert_activation_backward": _expert_activation_backward,
}

ONLY_ON_CUDA = {
    f"aten._scaled_dot_product_{kind}_attention{direction}"
    for kind in ("flash", "efficient", "cudnn")
    for direction in ("", "_backward")
} | {"aten._fused_rms_norm_backward"}
"""Their rule is that of the op for CPUs, which is proven; what they return besides is described by hand."""
IRREGULAR_ONLY = {
    "lancet.kept_counts",
    "lancet.send_rows",
    "lancet.dispatch",
    "lancet.exchange_counts",
    "lancet.combine",
    "lancet.combine_dweight",
}
"""Cut behind the gate alone; proven on whole layers, in tests/schedules/rewrite/test_cut_torch.py."""
FUSED = {"lancet.fused_experts", "lancet.fused_experts_backward"}
"""Cut with the whole step alone; proven on ranks, in
tests/lancet_kernels/optimization/test_fused_duplex.py."""
