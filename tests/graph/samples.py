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

    def stretched(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`: leading dimensions left out, some of size one."""
        kept = shape[self._draw(st.integers(0, len(shape))) :]
        return tuple(n if self._draw(st.booleans()) else 1 for n in kept)


Sample = tuple[Callable, tuple, dict]

UNARY = """neg sqrt rsqrt reciprocal square exp exp2 expm1 log log2 log1p sin cos tan tanh sigmoid erf silu
    gelu relu leaky_relu elu hardtanh hardswish softplus abs sign round floor ceil trunc isnan isinf
    zeros_like ones_like clone detach alias lift_fresh_copy""".split()
BINARY = "add sub mul div pow remainder fmod maximum minimum eq ne lt le gt ge".split()
LOGICAL = "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor".split()


def _overload(op: str, *names: str) -> Callable:
    packet = getattr(aten, op)
    return next(getattr(packet, n) for n in names if n in packet.overloads())


def _unary(op: str) -> Callable[[Draw], Sample]:
    return lambda d: (_overload(op, "default"), (d.real(*d.shape()),), {})


def _binary(op: str) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        operands = [d.real(*shape), d.real(*d.stretched(shape))]
        if d.one_of(True, False):
            operands.reverse()
        return _overload(op, "Tensor", "Tensor_Tensor", "default"), tuple(operands), {}

    return make


def _logical(op: str) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        return _overload(op, "Tensor", "default"), (d.flag(*shape), d.flag(*d.stretched(shape))), {}

    return make


def _three(op: str) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        return (
            _overload(op, "Tensor", "default"),
            tuple(d.real(*s) for s in (shape, d.stretched(shape), shape)),
            {},
        )

    return make


def _where(d: Draw) -> Sample:
    shape = d.shape()
    return aten.where.self, (d.flag(*d.stretched(shape)), d.real(*shape), d.real(*d.stretched(shape))), {}


def _masked_fill(d: Draw) -> Sample:
    shape = d.shape()
    return aten.masked_fill.Scalar, (d.real(*shape), d.flag(*d.stretched(shape)), -1.5), {}


def _copy(d: Draw) -> Sample:
    shape = d.shape()
    return aten.copy.default, (d.real(*shape), d.real(*d.stretched(shape))), {}


def _expand(d: Draw) -> Sample:
    shape = d.shape()
    return aten.expand.default, (d.real(*d.stretched(shape)), list(shape)), {}


def _view(op: str) -> Callable[[Draw], Sample]:
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


def _unsqueeze(d: Draw) -> Sample:
    shape = d.shape()
    return aten.unsqueeze.default, (d.real(*shape), d.dim(len(shape) + 1)), {}


def _squeeze(d: Draw) -> Sample:
    shape = d.shape()
    x = d.real(*shape)
    dims = sorted({d.dim(len(shape)) % len(shape) for _ in range(2)})
    return (
        *d.one_of(
            (aten.squeeze.default, (x,)), (aten.squeeze.dim, (x, dims[0])), (aten.squeeze.dims, (x, dims))
        ),
        {},
    )


def _flatten(d: Draw) -> Sample:
    shape = d.shape()
    first, last = sorted(d.dim(len(shape)) % len(shape) for _ in range(2))
    return aten.flatten.using_ints, (d.real(*shape), first, last), {}


def _unflatten(d: Draw) -> Sample:
    shape = list(d.shape())
    dim, sizes = d.dim(len(shape)), [d.size(1, 3), d.size(1, 4)]
    shape[dim] = sizes[0] * sizes[1]
    return aten.unflatten.int, (d.real(*shape), dim, sizes), {}


def _softmax(op: str, *rest: object) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        return _overload(op, "default", "int"), (d.real(*shape), d.dim(len(shape)), *rest), {}

    return make


def _cat(d: Draw) -> Sample:
    shape = list(d.shape())
    dim = d.dim(len(shape))
    other = list(shape)
    other[dim] = d.size()
    tensors = [d.real(*shape), d.real(*other)]
    return aten.cat.default, (tensors, dim) if dim % len(shape) or d.one_of(True, False) else (tensors,), {}


def _stack(d: Draw) -> Sample:
    shape = d.shape(1, 3)
    return aten.stack.default, ([d.real(*shape), d.real(*shape)], d.dim(len(shape) + 1)), {}


def _split(d: Draw) -> Sample:
    shape = d.shape()
    return aten.split.Tensor, (d.real(*shape), d.size(1, 3), d.dim(len(shape))), {}


def _split_with_sizes(d: Draw) -> Sample:
    shape = list(d.shape())
    dim, sizes = d.dim(len(shape)), [d.size(1, 3), d.size(1, 3)]
    shape[dim] = sum(sizes)
    return aten.split_with_sizes.default, (d.real(*shape), sizes, dim), {}


def _chunk(d: Draw) -> Sample:
    shape = d.shape()
    return aten.chunk.default, (d.real(*shape), d.size(1, 3), d.dim(len(shape))), {}


def _slice(d: Draw) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    first = d.size(0, shape[dim] - 1)
    return (
        aten.slice.Tensor,
        (d.real(*shape), dim, first, d.size(first + 1, shape[dim] + 2), d.size(1, 2)),
        {},
    )


def _select(d: Draw) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    return aten.select.int, (d.real(*shape), dim, d.size(-shape[dim], shape[dim] - 1)), {}


def _with_dim(target: Callable) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        return target, (d.real(*shape), d.dim(len(shape))), {}

    return make


def _permute(d: Draw) -> Sample:
    shape = d.shape()
    return aten.permute.default, (d.real(*shape), d._draw(st.permutations(range(len(shape))))), {}


def _transpose(d: Draw) -> Sample:
    shape = d.shape()
    return aten.transpose.int, (d.real(*shape), d.dim(len(shape)), d.dim(len(shape))), {}


def _reduction(target: Callable, *, one_dim: bool = False, extra: tuple = ()) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        dims = sorted({d.dim(len(shape)) % len(shape) for _ in range(d.size(1, len(shape)))})
        keep = d.one_of(True, False)
        x = d.real(*shape)
        if "correction" in str(target):
            return target, (x, dims), {"correction": 0, "keepdim": keep}
        return target, (x, dims[0] if one_dim else dims, *extra, keep), {}

    return make


def _sum(d: Draw) -> Sample:
    shape = d.shape()
    if d.one_of(True, False, False):
        return (
            *d.one_of((aten.sum.default, (d.real(*shape),)), (aten.sum.dim_IntList, (d.real(*shape), []))),
            {},
        )
    return _reduction(aten.sum.dim_IntList)(d)


def _gather(d: Draw) -> Sample:
    shape = list(d.shape())
    dim, index = d.dim(len(shape)), list(shape)
    index[dim] = d.size()
    if d.one_of(True, False):
        other = d.dim(len(shape))
        index[other] = d.size(1, shape[other])
    return aten.gather.default, (d.real(*shape), dim, d.whole(shape[dim], *index)), {}


def _triangle(op: str) -> Callable[[Draw], Sample]:
    return lambda d: (getattr(aten, op).default, (d.real(*d.shape(2, 4)), d.size(-1, 1)), {})


def _repeat(d: Draw) -> Sample:
    shape = d.shape(1, 3)
    times = [d.size(1, 2) for _ in range(len(shape) + d.size(0, 1))]
    return aten.repeat.default, (d.real(*shape), times), {}


def _pad(d: Draw) -> Sample:
    shape = d.shape()
    return (
        aten.constant_pad_nd.default,
        (d.real(*shape), [d.size(0, 2) for _ in range(2 * d.size(1, len(shape)))], 1.0),
        {},
    )


def _embedding(d: Draw) -> Sample:
    rows = d.size(2, 9)
    return aten.embedding.default, (d.real(rows, d.size()), d.whole(rows, *d.shape(1, 3))), {}


def _mm(d: Draw) -> Sample:
    t, k, f = d.size(), d.size(), d.size()
    return aten.mm.default, (d.real(t, k), d.real(k, f)), {}


def _mv(d: Draw) -> Sample:
    t, k = d.size(), d.size()
    return aten.mv.default, (d.real(t, k), d.real(k)), {}


def _addmm(d: Draw) -> Sample:
    t, k, f = d.size(), d.size(), d.size()
    return (
        aten.addmm.default,
        (d.real(*d.one_of((f,), (1, f), (t, f), (t, 1), (1,))), d.real(t, k), d.real(k, f)),
        {},
    )


def _bmm(d: Draw) -> Sample:
    b, t, k, f = (d.size() for _ in range(4))
    return aten.bmm.default, (d.real(b, t, k), d.real(b, k, f)), {}


def _baddbmm(d: Draw) -> Sample:
    b, t, k, f = (d.size() for _ in range(4))
    return (
        aten.baddbmm.default,
        (d.real(*d.one_of((b, t, f), (1, t, f), (b, 1, f))), d.real(b, t, k), d.real(b, k, f)),
        {},
    )


def _linear(d: Draw) -> Sample:
    shape, f = d.shape(1, 4), d.size()
    bias = (d.real(f),) if d.one_of(True, False) else ()
    return aten.linear.default, (d.real(*shape), d.real(f, shape[-1]), *bias), {}


def _norm(op: str) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape(2, 4)
        normalized = shape[d.size(1, len(shape) - 1) :]
        weight = d.real(*normalized) if d.one_of(True, False) else None
        bias = d.real(*normalized) if weight is not None and d.one_of(True, False) else None
        x = d.real(*shape)
        if op == "native_layer_norm":
            return aten.native_layer_norm.default, (x, list(normalized), weight, bias, 1e-5), {}
        if op == "layer_norm":
            return aten.layer_norm.default, (x, list(normalized), weight, bias), {}
        return getattr(aten, op).default, (x, list(normalized), weight, 1e-6), {}

    return make


def _attention(op: str) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        b, h, s, t, a = (d.size() for _ in range(5))
        query, key, value = d.real(b, h, s, a), d.real(b, h, t, a), d.real(b, h, t, a)
        causal = d.one_of(True, False)
        mask = None if causal or d.one_of(True, False) else d.real(*d.one_of((b, h), (b, 1), (1, 1)), s, t)
        if op == "scaled_dot_product_attention":
            if mask is not None and d.one_of(True, False):
                mask = d.real(s, t)
            if d.one_of(True, False) and h % 2 == 0:
                key, value = d.real(b, h // 2, t, a), d.real(b, h // 2, t, a)
                return (
                    aten.scaled_dot_product_attention.default,
                    (query, key, value, mask, 0.0, causal),
                    {"enable_gqa": True},
                )
            return aten.scaled_dot_product_attention.default, (query, key, value, mask, 0.0, causal), {}
        return (
            getattr(aten, op).default,
            (query, key, value, 0.0, causal),
            {} if mask is None else {"attn_mask": mask},
        )

    return make


def _attention_backward(d: Draw) -> Sample:
    b, h, s, t, a = (d.size() for _ in range(5))
    query, key, value = d.real(b, h, s, a), d.real(b, h, t, a), d.real(b, h, t, a)
    causal = d.one_of(True, False)
    mask = None if causal or d.one_of(True, False) else d.real(*d.one_of((b, h), (b, 1), (1, 1)), s, t)
    by_name = {} if mask is None else {"attn_mask": mask}
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    result, logsumexp = forward(query, key, value, 0.0, causal, **by_name)
    operands = d.real(*result.shape), query, key, value, result, logsumexp, 0.0, causal
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, operands, by_name


def _norm_backward(d: Draw) -> Sample:
    shape = d.shape(2, 4)
    normalized = list(shape[d.size(1, len(shape) - 1) :])
    statistics = [*shape[: len(shape) - len(normalized)], *[1] * len(normalized)]
    weight = d.real(*normalized) if d.one_of(True, False) else None
    bias = d.real(*normalized) if weight is not None and d.one_of(True, False) else None
    asked = [True, weight is not None, bias is not None]
    operands = d.real(*shape), d.real(*shape), normalized, d.real(*statistics), d.real(*statistics)
    return aten.native_layer_norm_backward.default, (*operands, weight, bias, asked), {}


def _loss(d: Draw, *behind: int) -> tuple:
    """log p, targets, weights of classes; some targets are ignored (-100), never all."""
    batch, classes = d.size(), d.size(2, 5)
    target = d.whole(classes, batch, *behind)
    target[1:] = torch.where(d.flag(*target[1:].shape), target[1:], -100)
    weight = d.real(classes).abs() + 0.1 if d.one_of(True, False) else None
    return d.real(batch, classes, *behind), target, weight, d.one_of(0, MEAN, SUM), -100


MEAN, SUM = 1, 2


def _nll_loss(d: Draw) -> Sample:
    return aten.nll_loss_forward.default, _loss(d), {}


def _nll_loss2d(d: Draw) -> Sample:
    return aten.nll_loss2d_forward.default, _loss(d, d.size(), d.size()), {}


def _nll_loss_backward(op: str) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        loss = _loss(d, *(() if op == "nll_loss" else (d.size(), d.size())))
        result, total = getattr(aten, f"{op}_forward").default(*loss)
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


def _softmax_backward(op: str) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        operands = d.real(*shape), d.real(*shape), d.dim(len(shape)), torch.float64
        return getattr(aten, op).default, operands, {}

    return make


def _activation_backward(op: str, *rest: object) -> Callable[[Draw], Sample]:
    def make(d: Draw) -> Sample:
        shape = d.shape()
        return getattr(aten, op).default, (d.real(*shape), d.real(*shape), *rest), {}

    return make


def _elu_backward(d: Draw) -> Sample:
    shape = d.shape()
    return aten.elu_backward.default, (d.real(*shape), 1.0, 1.0, 1.0, False, d.real(*shape)), {}


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
    return lancet.gate.default, (logits, used, key, bias, spec, top_k, d.size(1, 4)), {}


def _dropout(d: Draw) -> Sample:
    *tokens, width = d.shape()
    element = d.whole(1000, *tokens), d.whole(1000, width)
    return lancet.dropout.default, (d.real(*tokens, width), *element, d.whole(9), 0.5, 1, d.size()), {}


class Experts:
    """Rows of an MoE layer: W ranks, L experts each, counts of rows."""

    def __init__(self, d: Draw) -> None:
        self.ranks, self.local = d.size(1, 2), d.size(1, 3)
        self.width, self.hidden = d.size(1, 5), 2 * d.size(1, 3)
        self.counts = d.whole(9, self.ranks, self.local)
        self.counts[0, 0] += 1
        self.d = d

    def rows(self, width: int) -> Tensor:
        return self.d.real(int(self.counts.sum()), width)


def _all_to_all(d: Draw) -> Sample:
    e = Experts(d)
    counts = e.counts[:1]
    rows = e.d.real(int(counts.sum()), e.width)
    return lancet.all_to_all.default, (rows, counts, counts.clone(), "", d.one_of(True, False)), {}


def _grouped_gemm(d: Draw) -> Sample:
    e = Experts(d)
    bias = d.real(e.local, e.hidden) if d.one_of(True, False) else None
    return (
        lancet.grouped_gemm.default,
        (e.rows(e.width), e.counts, d.real(e.local, e.width, e.hidden), bias),
        {},
    )


def _grouped_gemm_dx(d: Draw) -> Sample:
    e = Experts(d)
    return (
        lancet.grouped_gemm_dx.default,
        (e.rows(e.hidden), e.counts, d.real(e.local, e.width, e.hidden)),
        {},
    )


def _grouped_gemm_dw(d: Draw) -> Sample:
    e = Experts(d)
    return lancet.grouped_gemm_dw.default, (e.rows(e.width), e.rows(e.hidden), e.counts), {}


def _grouped_gemm_dbias(d: Draw) -> Sample:
    e = Experts(d)
    return lancet.grouped_gemm_dbias.default, (e.rows(e.hidden), e.counts), {}


def _expert_activation(d: Draw) -> Sample:
    e = Experts(d)
    return (
        lancet.expert_activation.default,
        (e.rows(e.hidden), e.counts, d.one_of("gelu", "silu", "swiglu")),
        {},
    )


def _expert_activation_backward(d: Draw) -> Sample:
    e, kind = Experts(d), d.one_of("gelu", "silu", "swiglu")
    outer = e.hidden // 2 if kind == "swiglu" else e.hidden
    return (
        lancet.expert_activation_backward.default,
        (e.rows(outer), e.rows(e.hidden), e.counts, kind),
        {},
    )


SAMPLES: dict[str, Callable[[Draw], Sample]] = {
    **{f"aten.{op}": _unary(op) for op in UNARY},
    **{f"aten.{op}": _binary(op) for op in BINARY},
    **{f"aten.{op}": _logical(op) for op in LOGICAL},
    **{f"aten.{op}": _view(op) for op in ("view", "reshape", "_unsafe_view")},
    **{f"aten.{op}": _triangle(op) for op in ("tril", "triu")},
    **{f"aten.{op}": _norm(op) for op in ("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm")},
    **{
        f"aten.{op}": _attention(op)
        for op in ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu")
    },
    "aten.rsub": lambda d: (aten.rsub.Scalar, (d.real(*d.shape()), 1.5), {}),
    "aten.clamp": lambda d: (aten.clamp.default, (d.real(*d.shape()), -0.5, 0.5), {}),
    "aten.clamp_min": lambda d: (aten.clamp_min.default, (d.real(*d.shape()), 0.1), {}),
    "aten.clamp_max": lambda d: (aten.clamp_max.default, (d.real(*d.shape()), 0.1), {}),
    "aten.logical_not": lambda d: (aten.logical_not.default, (d.flag(*d.shape()),), {}),
    "aten.bitwise_not": lambda d: (aten.bitwise_not.default, (d.flag(*d.shape()),), {}),
    "aten.full_like": lambda d: (aten.full_like.default, (d.real(*d.shape()), 2.5), {}),
    "aten._to_copy": lambda d: (aten._to_copy.default, (d.real(*d.shape()),), {"dtype": torch.float32}),
    "aten.copy": _copy,
    "aten.log_sigmoid_forward": _unary("log_sigmoid_forward"),
    "aten.addcmul": _three("addcmul"),
    "aten.addcdiv": _three("addcdiv"),
    "aten.lerp": _three("lerp"),
    "aten.where": _where,
    "aten.masked_fill": _masked_fill,
    "aten.expand": _expand,
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
    "aten.flatten": _flatten,
    "aten.unflatten": _unflatten,
    "aten._softmax": _softmax("_softmax", False),
    "aten._log_softmax": _softmax("_log_softmax", False),
    "aten.softmax": _softmax("softmax"),
    "aten.log_softmax": _softmax("log_softmax"),
    "aten.cat": _cat,
    "aten.stack": _stack,
    "aten.split": _split,
    "aten.split_with_sizes": _split_with_sizes,
    "aten.chunk": _chunk,
    "aten.slice": _slice,
    "aten.select": _select,
    "aten.unbind": _with_dim(aten.unbind.int),
    "aten.cumsum": _with_dim(aten.cumsum.default),
    "aten.permute": _permute,
    "aten.transpose": _transpose,
    "aten.t": lambda d: (aten.t.default, (d.real(*d.shape(1, 2)),), {}),
    "aten.sum": _sum,
    "aten.mean": _reduction(aten.mean.dim),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten.native_layer_norm_backward": _norm_backward,
    "aten.nll_loss_forward": _nll_loss,
    "aten.nll_loss2d_forward": _nll_loss2d,
    **{f"aten.{op}_backward": _nll_loss_backward(op) for op in ("nll_loss", "nll_loss2d")},
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.slice_backward": _slice_backward,
    "aten.select_backward": _select_backward,
    **{
        f"aten.{op}": _softmax_backward(op) for op in ("_softmax_backward_data", "_log_softmax_backward_data")
    },
    **{
        f"aten.{op}_backward": _activation_backward(f"{op}_backward", *rest)
        for op, *rest in (
            ("gelu",),
            ("silu",),
            ("threshold", 0.0),
            ("sigmoid",),
            ("tanh",),
            ("leaky_relu", 0.1, False),
            ("hardtanh", -1.0, 1.0),
            ("hardswish",),
            ("softplus", 1.0, 20.0),
        )
    },
    "aten.elu_backward": _elu_backward,
    "aten.log_sigmoid_backward": _log_sigmoid_backward,
    "lancet.gate_backward": _gate_backward,
    "aten.logsumexp": _reduction(aten.logsumexp.default),
    "aten.amax": _reduction(aten.amax.default),
    "aten.amin": _reduction(aten.amin.default),
    "aten.all": _reduction(aten.all.dim, one_dim=True),
    "aten.any": _reduction(aten.any.dim, one_dim=True),
    "aten.argmax": _reduction(aten.argmax.default, one_dim=True),
    "aten.argmin": _reduction(aten.argmin.default, one_dim=True),
    "aten.prod": _reduction(aten.prod.dim_int, one_dim=True),
    "aten.var": _reduction(aten.var.correction),
    "aten.std": _reduction(aten.std.correction),
    "aten.var_mean": _reduction(aten.var_mean.correction),
    "aten.gather": _gather,
    "aten.repeat": _repeat,
    "aten.constant_pad_nd": _pad,
    "aten.embedding": _embedding,
    "aten.mm": _mm,
    "aten.mv": _mv,
    "aten.addmm": _addmm,
    "aten.bmm": _bmm,
    "aten.baddbmm": _baddbmm,
    "aten.linear": _linear,
    "lancet.dropout": _dropout,
    "lancet.gate": _gate,
    "lancet.all_to_all": _all_to_all,
    "lancet.grouped_gemm": _grouped_gemm,
    "lancet.grouped_gemm_dx": _grouped_gemm_dx,
    "lancet.grouped_gemm_dw": _grouped_gemm_dw,
    "lancet.grouped_gemm_dbias": _grouped_gemm_dbias,
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
