"""The facts of every op, in one table: what it occupies, along which dimensions it may be cut, what its price
depends on, whether the host waits for it, whether checkpointing recomputes it.

A new op needs a row of `OPS` for the planner, and nothing else; `tests/graph/test_ops.py` fails for an op of
this library without one. An op of torch without a row is computation that is never cut.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lancet_kernels.graph.program import Instruction, Kind
from lancet_kernels.graph.rules import derived
from lancet_kernels.graph.rules.derived import Derivation
from lancet_kernels.graph.rules.rules import Rule
from lancet_kernels.ops.comm.all_to_all import start_all_to_all, start_exchange_counts
from lancet_kernels.ops.comm.redistribute import start_shift
from lancet_kernels.ops.moe.expert_ops import waits_for_counts

COLLECTIVE_NAMESPACE = "_c10d_functional."


@dataclass(frozen=True)
class OpFacts:
    """What the planner must know of one op.

    rule: how it may be cut; None: never.
    kind: the resource that it occupies.
    collective: the name of a gather or scatter in cost models.
    start: starts the collective and returns its `Pending`; None: torch does.
    over_link: a link group has this functional collective (`ops.comm.link_group`).
    of_a_layer: an error in it names the MoE layer, though it is computation in the Program.
    host_waits: does the host wait for the GPU in this node, whose sources have `meta["val"]`? None: never.
    A graph with such a node cannot be captured as CUDA graph.
    is_recomputed: checkpointing recomputes it.
    parts_are_measured: it dominates the time of a step, or a part of it takes nearly as long as the whole;
    the times of parts of other ops are estimated.
    moves_rows: it sorts rows by expert, or back.
    grouped_gemm: "rows" or "weight", the result of a product by expert.
    hardly_read: the argument of which the op reads only single elements or rows, or only the shape: its
    bytes do not count.
    """

    rule: Rule | None = None
    kind: Kind = Kind.COMPUTE
    collective: str = ""
    start: Callable[..., Any] | None = None
    over_link: bool = False
    of_a_layer: bool = False
    host_waits: Callable[[fx.Node], bool] | None = None
    is_recomputed: bool = True
    parts_are_measured: bool = False
    moves_rows: bool = False
    grouped_gemm: str = ""
    hardly_read: str = ""


def facts(op: str) -> OpFacts:
    """The facts of an op by name, as in `Instruction.op`."""
    return OPS.get(op, _OTHER_COLLECTIVE if op.startswith(COLLECTIVE_NAMESPACE) else _NO_FACTS)


def rule_for(instruction: Instruction) -> Rule | None:
    """The rule of an instruction's op; None if it has none, and is never partitioned."""
    return facts(instruction.op).rule


def is_gate(instruction: Instruction) -> bool:
    """Does it assign slots, and carry the number of used ones from part to part?"""
    rule = rule_for(instruction)
    return rule is not None and bool(rule.carries)


def argument(node: fx.Node, name: str) -> Any:
    """The argument that a node passes to an op by position. Args: name: as in the op's schema."""
    return node.args[argument_names(node.target).index(name)]


@functools.cache
def argument_names(target: Any) -> tuple[str, ...]:
    """The names of the arguments in the schema of an op, or in the signature of a function of Python."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    return tuple(inspect.signature(target).parameters) if inspect.isfunction(target) else ()


def _always_waits(node: fx.Node) -> bool:
    return True


def _waits_for_sizes(node: fx.Node) -> bool:
    """Only with a group: without one there are no sizes to exchange."""
    return bool(argument(node, "group"))


def _waits_for_counts(node: fx.Node) -> bool:
    return waits_for_counts(*(a.meta["val"] for a in node.args if isinstance(a, fx.Node)))


def _waits_for_mask(node: fx.Node) -> bool:
    # index_put with a mask and a single number is a masked_fill, which does not wait.
    if len(node.args) > 2:
        value = node.args[2].meta["val"] if isinstance(node.args[2], fx.Node) else node.args[2]
        if not isinstance(value, Tensor) or value.numel() == 1:
            return False
    indices = [index.meta["val"] for index in argument(node, "indices") if isinstance(index, fx.Node)]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


_ELEMENTWISE = """add sub rsub mul div neg pow sqrt rsqrt reciprocal square exp exp2 expm1 log log2 log1p
    sin cos tan tanh sigmoid erf silu gelu relu leaky_relu elu hardtanh hardswish softplus log_sigmoid_forward
    abs sign round floor ceil trunc remainder fmod addcmul addcdiv lerp where masked_fill
    maximum minimum clamp clamp_min clamp_max eq ne lt le gt ge isnan isinf
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    zeros_like ones_like full_like _to_copy clone copy detach alias lift_fresh_copy
    gelu_backward silu_backward threshold_backward sigmoid_backward tanh_backward leaky_relu_backward
    log_sigmoid_backward elu_backward hardtanh_backward hardswish_backward softplus_backward"""
_ALONG = """_softmax softmax _log_softmax log_softmax cat stack split split_with_sizes slice select chunk
    unbind cumsum _softmax_backward_data _log_softmax_backward_data"""
_FUSED_ATTENTION = """_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"""


def _rows(ops: str, row: OpFacts, namespace: str = "aten.") -> dict[str, OpFacts]:
    return {namespace + op: row for op in ops.split()}


def _derived(derivation: Derivation, ops: str, measured: bool = False, **fields: Any) -> dict[str, OpFacts]:
    return _rows(ops, OpFacts(Rule(derived=derivation, **fields), parts_are_measured=measured))


def _gathering(op: str, collective: str) -> dict[str, OpFacts]:
    row = OpFacts(kind=Kind.OTHER_COMMUNICATION, collective=collective)
    return {
        **_rows(f"{op}_coalesced {op}_out", row, COLLECTIVE_NAMESPACE),
        **_rows(op, replace(row, over_link=True), COLLECTIVE_NAMESPACE),
    }


def _of_experts(*equations: str, irregular: tuple[str, ...], **fields: Any) -> OpFacts:
    """An op on the rows of experts, whose counts it reads."""
    rule = Rule(equations, irregular=irregular, in_experts=True, count_arguments=("count_WL",))
    return OpFacts(rule, **fields)


_GROUPED_GEMM: dict[str, Any] = {"host_waits": _waits_for_counts, "parts_are_measured": True}
_NLL_LOSS = Rule(derived=derived.nll_loss, reduction_argument="reduction")
_NLL_LOSS_BACKWARD = Rule(derived=derived.nll_loss_backward)
_NO_FACTS, _OTHER_COLLECTIVE = OpFacts(), OpFacts(kind=Kind.OTHER_COMMUNICATION)
OPS: dict[str, OpFacts] = {
    **_derived(derived.elementwise, _ELEMENTWISE),
    **_derived(derived.elementwise, "expand", shape_argument="size"),
    **_derived(derived.view, "unsqueeze flatten"),
    **_derived(derived.view, "view _unsafe_view", shape_argument="size"),
    **_derived(derived.view, "reshape", shape_argument="shape"),
    **_derived(derived.along, _ALONG),
    **_derived(derived.along, "slice_backward select_backward", shape_argument="input_sizes"),
    **_derived(derived.permute, "permute transpose t"),
    **_derived(derived.squeeze, "squeeze"),
    **_derived(derived.unflatten, "unflatten"),
    **_derived(derived.gather, "gather scatter scatter_add"),
    "aten.topk": OpFacts(Rule(derived=derived.top_k), is_recomputed=False),
    **_derived(derived.repeat, "repeat"),
    **_derived(derived.pad, "constant_pad_nd"),
    **_derived(derived.last_two, "tril triu"),
    **_derived(derived.sums, "sum"),
    **_derived(derived.sums, "mean", averages=True),
    **_derived(derived.reduces, "logsumexp amax amin all any argmax argmin var_mean var std prod"),
    **_derived(derived.norm, "native_layer_norm", measured=True),
    **_derived(derived.norm, "layer_norm rms_norm _fused_rms_norm"),
    **_derived(derived.norm_backward, "native_layer_norm_backward _fused_rms_norm_backward"),
    **_derived(derived.attention, f"scaled_dot_product_attention {_FUSED_ATTENTION}", measured=True),
    **_derived(derived.attention_backward, " ".join(f"{op}_backward" for op in _FUSED_ATTENTION.split())),
    # They stand for layers in predictions, and compute nothing.
    "lancet_prediction.attention": OpFacts(Rule(derived=derived.attention)),
    "lancet_prediction.attention_backward": OpFacts(Rule(derived=derived.attention_backward)),
    "lancet_prediction.recurrence": OpFacts(Rule(derived=derived.recurrence)),
    "lancet_prediction.recurrence_backward": OpFacts(Rule(derived=derived.recurrence)),
    "aten.nll_loss_forward": OpFacts(_NLL_LOSS, hardly_read="self"),
    "aten.nll_loss2d_forward": OpFacts(_NLL_LOSS),
    "aten.nll_loss_backward": OpFacts(_NLL_LOSS_BACKWARD, hardly_read="self"),
    "aten.nll_loss2d_backward": OpFacts(_NLL_LOSS_BACKWARD),
    **_derived(derived.embedding_backward, "embedding_dense_backward"),
    "aten.mm": OpFacts(Rule(("t d, d f -> t f",)), parts_are_measured=True),
    "aten.mv": OpFacts(Rule(("t d, d -> t",))),
    # No partial sums: the bias must be added once.
    "aten.addmm": OpFacts(Rule(("f, t d!, d! f -> t f", "t f, t d!, d! f -> t f")), parts_are_measured=True),
    "aten.bmm": OpFacts(Rule(("b t d, b d f -> b t f",)), parts_are_measured=True),
    "aten.baddbmm": OpFacts(Rule(("b t f, b t d!, b d! f -> b t f",)), parts_are_measured=True),
    "aten.linear": OpFacts(
        Rule(("... d, f d -> ... f", "... d!, f d!, f -> ... f")), parts_are_measured=True
    ),
    "aten.embedding": OpFacts(Rule(derived=derived.embedding), hardly_read="weight"),
    # x[..., D], token index[...], feature index[D], step -> y[..., D]
    "lancet.dropout": OpFacts(Rule(("... d, ..., d, - -> ... d",))),
    # logits[T, E], used[E], key[T], bias[E] (, real[T, 1]); which of these depends on the gate
    #   -> expert[T, K], slot[T, K], weight[T, K], used'[E] (capacity passing, section 2.3)
    "lancet.gate": OpFacts(
        Rule(
            (
                "t e!, - -> t k, t k, t k, -",
                "-, t -> t k, t k, t k, -",
                "t e!, -, e! -> t k, t k, t k, -",
                "t e!, -, t 1 -> t k, t k, t k, -",
                "-, t, t 1 -> t k, t k, t k, -",
                "t e!, -, e!, t 1 -> t k, t k, t k, -",
            ),
            carries=((3, "used_E"),),
        ),
        is_recomputed=False,
        parts_are_measured=True,
    ),
    # expert[T, K], used[E] (, real[T, 1]) -> slot[T, K], used'[E]
    "lancet.assign_slots": OpFacts(
        Rule(("t k!, - -> t k!, -", "t k!, -, t 1 -> t k!, -"), carries=((1, "used_E"),)),
        is_recomputed=False,
        parts_are_measured=True,
    ),
    # used'[E] -> counts[W, E_l]: after a gate that is cut, or for a part of the routing of an uncut gate
    "lancet.kept_counts": OpFacts(
        Rule(("e! -> w! l!",), irregular=("^ -> ~", ". -> ~"), is_count=True, routing="counts"),
        is_recomputed=False,
    ),
    # expert[T, K], slot[T, K], counts[W, E_l] -> row[T, K]: in a part, indices into that part's rows
    "lancet.send_rows": OpFacts(
        Rule(("t! k!, t! k!, w! e! -> t! k!",), irregular=("t, t, ~ -> t",), routing="rows")
    ),
    # x[T, D], row[T, K] (, weight[T, K]) -> rows[S, D]
    "lancet.dispatch": OpFacts(
        Rule(
            ("t! d!, t! k! -> r! d!", "t! d!, t! k!, t! k! -> r! d!"),
            irregular=("t, t -> ~", "t, t, t -> ~"),
            row_argument="row_TK",
            most_rows_argument="most_rows",
            num_rows_argument="num_rows",
        ),
        parts_are_measured=True,
        moves_rows=True,
    ),
    "lancet.exchange_counts": OpFacts(
        Rule(("w! e! -> w! e!",), irregular=("~ -> ~",), in_experts=True, is_count=True),
        start=start_exchange_counts,
        of_a_layer=True,
        host_waits=_waits_for_sizes,
        is_recomputed=False,
        parts_are_measured=True,
    ),
    # x[S, D], send counts[W, E_l], receive counts -> y[R, D]
    "lancet.all_to_all": OpFacts(
        Rule(
            ("r d!, w! e!, w! e! -> r d!",),
            irregular=("~, ~, ~ -> ~",),
            in_experts=True,
            count_arguments=("send_count_WL", "receive_count_WL"),
            to_experts_argument="to_experts",
            num_rows_argument="num_rows",
        ),
        kind=Kind.ALL_TO_ALL,
        start=start_all_to_all,
        host_waits=_waits_for_sizes,
    ),
    # x[R, D], counts[W, E_l], weight[E_l, D, F] (, bias[E_l, F]) -> y[R, F]
    "lancet.grouped_gemm": _of_experts(
        "r d, w! e!, e! d! f! -> r f!",
        "r d, w! e!, e! d! f!, e! f! -> r f!",
        irregular=("~, ~, . -> ~", "~, ~, ., . -> ~"),
        grouped_gemm="rows",
        **_GROUPED_GEMM,
    ),
    # h[R, F], counts[W, E_l] -> a[R, F]
    "lancet.expert_activation": _of_experts(
        "r f!, w! e! -> r g!", irregular=("~, ~ -> ~",), parts_are_measured=True
    ),
    # Backward of the experts: dy, counts, weight -> dx;  x, dy, counts -> dweight;  da, h, counts -> dh
    "lancet.grouped_gemm_dx": _of_experts(
        "r f, w! e!, e! d! f -> r d!", irregular=("~, ~, . -> ~",), grouped_gemm="rows", **_GROUPED_GEMM
    ),
    "lancet.grouped_gemm_dw": _of_experts(
        "r+ d!, r+ f!, w! e! -> e! d! f!", irregular=("~, ~, ~ -> +",), grouped_gemm="weight", **_GROUPED_GEMM
    ),
    "lancet.grouped_gemm_dbias": _of_experts("r+ f!, w! e! -> e! f!", irregular=("~, ~ -> +",)),
    "lancet.expert_activation_backward": _of_experts(
        "r f!, r g!, w! e! -> r g!", irregular=("~, ~, ~ -> ~",), parts_are_measured=True
    ),
    # y[S, D], row[T, K] (, weight[T, K]) -> out[T, D]
    "lancet.combine": OpFacts(
        Rule(
            ("r! d!, t! k! -> t! d!", "r! d!, t k!, t k! -> t! d!"), irregular=("~, t -> t", "~, t, t -> t")
        ),
        parts_are_measured=True,
        moves_rows=True,
    ),
    # Backward of combine's and dispatch's weights: x[T, D], y[S, D], row[T, K] -> dweight[T, K]
    "lancet.combine_dweight": OpFacts(
        Rule(("t! d!, r! d!, t! k! -> t! k!",), irregular=("t, ~, t -> t",)), moves_rows=True
    ),
    # x[T, D], expert[T, K], row[T, K], weight[T, K], counts[W, E_l], w1 (, b1), w2 (, b2) -> y[T, D], ticket
    "lancet.fused_experts": OpFacts(
        Rule(
            (
                "t! d!, t! k!, t! k!, t! k!, w! e!, e! d! h!, e! f! d! -> t! d!, *",
                "t! d!, t! k!, t! k!, t! k!, w! e!, e! d! h!, e! h!, e! f! d!, e! d! -> t! d!, *",
            ),
            irregular=("t, t, t, t, ~, ., . -> t, ^", "t, t, t, t, ~, ., ., ., . -> t, ^"),
            row_argument="row_TK",
            with_backward=True,
        ),
        of_a_layer=True,
    ),
    # dy[T, D], ticket, weight[T, K], w1 (, b1), w2 (, b2) (, fillers' operands [T, A]) (, x[T, D])
    #   -> dx[T, D], dweight[T, K], dw1, dw2 (, db1, db2) (, fillers' results [A, B])
    "lancet.fused_experts_backward": OpFacts(
        Rule(derived=derived.fused_backward, with_backward=True), of_a_layer=True
    ),
    # dweight[T, K], logits[T, E], expert[T, K] -> dlogits[T, E]
    "lancet.gate_backward": OpFacts(Rule(("t k!, t e!, t k! -> t e!",))),
    # Ops that only graphs with parts or with shards have, and ops outside the layers.
    **_rows("part_rows merge_rows window_counts token_index", _NO_FACTS, "lancet."),
    **_rows("take_shard place_shard share_gradient take_tile sum_over_ranks", _NO_FACTS, "lancet."),
    **_rows("merge_parts window_rows", OpFacts(host_waits=_always_waits), "lancet."),
    "lancet.shift": OpFacts(kind=Kind.POINT_TO_POINT, start=start_shift),
    "lancet.redistribute": OpFacts(kind=Kind.OTHER_COMMUNICATION, collective="all_gather"),
    # The shapes of their results depend on data.
    **_rows(
        "_local_scalar_dense nonzero masked_select bincount _unique2 unique_consecutive unique_dim",
        OpFacts(host_waits=_always_waits),
    ),
    **_rows("index index_put index_put_", OpFacts(host_waits=_waits_for_mask)),
    "aten.repeat_interleave": OpFacts(host_waits=lambda node: "output_size" not in node.kwargs),
    **_rows("all_to_all_single", OpFacts(kind=Kind.ALL_TO_ALL, over_link=True), COLLECTIVE_NAMESPACE),
    **_rows(
        "all_reduce all_reduce_coalesced", OpFacts(kind=Kind.ALL_REDUCE, over_link=True), COLLECTIVE_NAMESPACE
    ),
    **_rows("all_reduce_", OpFacts(kind=Kind.ALL_REDUCE), COLLECTIVE_NAMESPACE),
    **_gathering("all_gather_into_tensor", "all_gather"),
    **_gathering("reduce_scatter_tensor", "reduce_scatter"),
}
STARTED = {row.start: op for op, row in OPS.items() if row.start is not None}
"""By function that starts a collective, the op."""
