"""The rule table: along which dimensions each op may be cut into parts, as einsum-like equations.

Lancet's partition constraints (section 5.2) follow from the rules: a matrix product `"t d, d f -> t f"` may
be cut along t (first operand and result) or along f (second operand and result). An op without a rule is
never partitioned.

MoE ops have further ways to be cut. A part of the batch sends between 0 and C rows to an expert, so after the
dispatch tensors are *irregular*: each part has some of the rows, and together they have all. In a range that
has only all-to-alls and experts, the rows `r` are cut instead: each part has a window of the slots of every
expert (`ops.moe.parts`), which is not a slice of the tensor.

A rule also says which arguments of an op differ between parts (shape, sizes, counts, carried tensors);
`schedules.rewrite.cut` uses this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lancet_kernels.graph.program.forms import CARRIED, IRREGULAR, PARTIAL, WHOLE, WINDOW, Form, cut_along
from lancet_kernels.graph.program.program import Instruction, TensorSpec
from lancet_kernels.graph.rules import derived
from lancet_kernels.graph.rules.derived import Derivation
from lancet_kernels.graph.rules.equations import Equation, Shape, parse

Tensors = Mapping[str, TensorSpec]

MEAN, SUM = 1, 2
"""The values of the `reduction` argument of torch's losses."""
_MARKS = {"~": IRREGULAR, ".": WHOLE, "^": CARRIED, "+": PARTIAL}


@dataclass(frozen=True)
class Rule:
    """How one op may be cut.

    equations: alternatives for different numbers of operands; the first that fits the operands is used.
    derived: instead, the function that gives the equation from shapes and attributes.
    irregular: for cuts after the gate: per operand `~` (irregular), `^` (carried), `.` (whole), `+` (partial)
    or a dimension name. in_experts: the op is an all-to-all or part of the experts, where rows may be cut.
    carries: (output, argument): the output of a part is this argument of the next part.

    Positions of arguments in the op's schema that differ between parts:
    shape_argument: the shape of the result.
    count_arguments: counts [W, E_l] of rows, those of the operands first.
    num_rows_argument: the number of rows, which is unknown for a part.
    most_rows_argument: an upper bound of it; for a part, at most its number of choices.
    row_argument: the row indices of the choices, in an op that sends rows to the experts.
    to_experts_argument: true if the rows are sent to the experts, so that the result is sorted by expert.
    is_count: results are counts of rows: the whole batch's are the sums of the parts'.
    routing: "counts" or "rows": each part computes its own from its own slots.
    reduction_argument: 1 means the mean. Parts compute sums (2) instead; the whole result is the total of
    these, divided by output 1.
    averages: the results of parts are weighted with their shares of the elements.
    with_backward: cut only where the backward is cut alike, because the parts of a result (a ticket) cannot
    be joined.
    """

    equations: tuple[str, ...] = ()
    derived: Derivation | None = None
    irregular: tuple[str, ...] = ()
    in_experts: bool = False
    carries: tuple[tuple[int, int], ...] = ()
    shape_argument: int | None = None
    count_arguments: tuple[int, ...] = ()
    num_rows_argument: int | None = None
    most_rows_argument: int | None = None
    to_experts_argument: int | None = None
    is_count: bool = False
    routing: str | None = None
    reduction_argument: int | None = None
    averages: bool = False
    row_argument: int | None = None
    with_backward: bool = False

    def arguments_of_slice(self, args: Sequence, shape: Sequence[int] | None, *, sums: bool = True) -> list:
        """The arguments with which the op computes one slice of its result.

        Args: shape: of the slice; None: of the whole result. sums: sum a loss whose mean is the total of the
            slices' sums, divided by their weights.
        """
        given = list(args)
        if self.shape_argument is not None and shape is not None:
            given[self.shape_argument] = list(shape)
        if sums and self.reduction_argument is not None and given[self.reduction_argument] == MEAN:
            given[self.reduction_argument] = SUM
        return given

    def equation(self, instruction: Instruction, tensors: Tensors) -> Equation | None:
        """The parsed equation of this instruction; None if no equation of the rule fits its operands."""
        inputs = [tensors[t].shape for t in instruction.inputs]
        outputs = [tensors[t].shape for t in instruction.outputs]
        texts = self.equations
        if self.derived:
            text = self.derived(inputs, outputs, instruction.attributes)
            texts = () if text is None else (text,)
        ranks = tuple(map(len, (*inputs, *outputs)))
        return next((parse(text, ranks) for text in texts if _fits(text, ranks, len(inputs))), None)

    def assignments(
        self, instruction: Instruction, tensors: Tensors, *, only_experts: bool, contractions: bool = False
    ) -> list[tuple[Form, ...]]:
        """Every way to cut the instruction: the form of each input and output.

        Args: only_experts: the range has only all-to-alls and experts. contractions: also cut contractions,
            which gives partial sums.

        Example: `aten.mm` gives (cut 0, whole, cut 0) and (whole, cut 1, cut 1): rows of the first operand,
        or columns of the second.
        """
        equation = self.equation(instruction, tensors)
        # An op that overwrites something (the state of the random generator, say) runs once, on the whole.
        if equation is None or instruction.attributes.get("partitionable") is False or instruction.mutates:
            return []
        if self.with_backward and not contractions:
            return []
        operands = _operands(instruction, equation)
        inputs = len(instruction.inputs)
        names: list[str] = []
        if only_experts or not self.in_experts:
            names = equation.cuttable
            if contractions:
                names = list(dict.fromkeys([*names, *sorted(equation.contractions)]))
        result: list[tuple[Form, ...]] = []
        for name in names:
            forms = [self._form(tensors[t].shape, dims, name) for t, dims in operands]
            sources, targets = forms[:inputs], forms[inputs:]
            if name in equation.summed | equation.contractions:
                targets = [
                    form if name in dims else PARTIAL
                    for form, dims in zip(targets, equation.outputs, strict=True)
                ]
            for target in (*(output for output, _ in self.carries), *equation.any_part):
                targets[target] = CARRIED
            if any(form != WHOLE for form in sources) and WHOLE not in targets:
                result.append((*sources, *targets))
        for text in () if only_experts else self.irregular:
            marks = text.replace("->", ",").replace(",", " ").split()
            if len(marks) == len(operands):
                result.append(
                    tuple(
                        _MARKS.get(mark) or self._form(tensors[t].shape, dims, mark)
                        for mark, (t, dims) in zip(marks, operands, strict=True)
                    )
                )
        return result

    def carried(self, instruction: Instruction, tensors: Tensors) -> list[tuple[int, int]]:
        """(input, output) positions of carried tensors: the input has the output's shape and dtype."""
        result = []
        for target, _ in self.carries:
            spec = tensors[instruction.outputs[target]]
            for source, name in enumerate(instruction.inputs):
                if (tensors[name].shape, tensors[name].dtype) == (spec.shape, spec.dtype):
                    result.append((source, target))
                    break
        return result

    def _form(self, shape: Shape, names: tuple[str | None, ...], name: str) -> Form:
        """The form of an operand if `name` is cut; a dimension of size one is broadcast and stays whole."""
        if name not in names or shape[names.index(name)] == 1:
            return WHOLE
        return WINDOW if self.in_experts and name == "r" else cut_along(names.index(name))

    def row_dimensions(self, instruction: Instruction, tensors: Tensors) -> dict[str, int]:
        """The dimension of the rows `r` of each operand: an irregular part has 1/k of these on average."""
        equation = self.equation(instruction, tensors)
        if equation is None:
            return {}
        return {t: names.index("r") for t, names in _operands(instruction, equation) if "r" in names}


def _operands(instruction: Instruction, equation: Equation) -> list[tuple[str, tuple[str | None, ...]]]:
    """Inputs and outputs with the names of their dimensions."""
    tensors = (*instruction.inputs, *instruction.outputs)
    return list(zip(tensors, (*equation.inputs, *equation.outputs), strict=True))


def rule_for(instruction: Instruction) -> Rule | None:
    """The rule of an instruction's op; None if it has none, and is never partitioned."""
    return RULES.get(instruction.op)


def _fits(text: str, ranks: tuple[int, ...], inputs: int) -> bool:
    left, right = (side.split(",") for side in text.split("->"))
    if len(left) != inputs or len(left) + len(right) != len(ranks):
        return False
    return all(
        operand.strip() in ("-", "*")
        or rank == len(operand.split())
        or ("..." in operand and rank >= len(operand.split()) - 1)
        for operand, rank in zip([*left, *right], ranks, strict=True)
    )


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
_FUSED_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]


def _derived(derivation: Derivation, ops: str, **arguments: Any) -> dict[str, Rule]:
    return {f"aten.{op}": Rule(derived=derivation, **arguments) for op in ops.split()}


RULES: dict[str, Rule] = {
    **_derived(derived.elementwise, _ELEMENTWISE),
    **_derived(derived.elementwise, "expand", shape_argument=1),
    **_derived(derived.view, "unsqueeze flatten"),
    **_derived(derived.view, "view reshape _unsafe_view", shape_argument=1),
    **_derived(derived.along, _ALONG),
    **_derived(derived.along, "slice_backward select_backward", shape_argument=1),
    **_derived(derived.permute, "permute transpose t"),
    **_derived(derived.squeeze, "squeeze"),
    **_derived(derived.unflatten, "unflatten"),
    **_derived(derived.gather, "gather"),
    **_derived(derived.repeat, "repeat"),
    **_derived(derived.pad, "constant_pad_nd"),
    **_derived(derived.last_two, "tril triu"),
    **_derived(derived.sums, "sum"),
    **_derived(derived.sums, "mean", averages=True),
    **_derived(derived.reduces, "logsumexp amax amin all any argmax argmin var_mean var std prod"),
    **_derived(derived.norm, "native_layer_norm layer_norm rms_norm _fused_rms_norm"),
    **_derived(derived.norm_backward, "native_layer_norm_backward _fused_rms_norm_backward"),
    **_derived(derived.attention, "scaled_dot_product_attention"),
    **_derived(derived.attention, " ".join(_FUSED_ATTENTION)),
    **_derived(derived.attention_backward, " ".join(f"{op}_backward" for op in _FUSED_ATTENTION)),
    **_derived(derived.nll_loss, "nll_loss_forward nll_loss2d_forward", reduction_argument=3),
    **_derived(derived.nll_loss_backward, "nll_loss_backward nll_loss2d_backward"),
    **_derived(derived.embedding_backward, "embedding_dense_backward"),
    "aten.mm": Rule(("t d, d f -> t f",)),
    "aten.mv": Rule(("t d, d -> t",)),
    # No partial sums: the bias must be added once.
    "aten.addmm": Rule(("f, t d!, d! f -> t f", "t f, t d!, d! f -> t f")),
    "aten.bmm": Rule(("b t d, b d f -> b t f",)),
    "aten.baddbmm": Rule(("b t f, b t d!, b d! f -> b t f",)),
    "aten.linear": Rule(("... d, f d -> ... f", "... d!, f d!, f -> ... f")),
    "aten.embedding": Rule(("v! d, ... -> ... d",)),
    # x[..., D], token index[...], feature index[D], step -> y[..., D]
    "lancet.dropout": Rule(("... d, ..., d, - -> ... d",)),
    # logits[T, E], used[E], key[T], bias[E]; which of these depends on the gate
    #   -> expert[T, K], slot[T, K], weight[T, K], used'[E] (capacity passing, section 2.3)
    "lancet.gate": Rule(
        (
            "t e!, - -> t k, t k, t k, -",
            "-, t -> t k, t k, t k, -",
            "t e!, -, - -> t k, t k, t k, -",
        ),
        carries=((3, 1),),
    ),
    # used'[E] -> counts[W, E_l]: after a gate that is cut, or for a part of the routing of an uncut gate
    "lancet.kept_counts": Rule(
        ("e! -> w! l!",), irregular=("^ -> ~", ". -> ~"), is_count=True, routing="counts"
    ),
    # expert[T, K], slot[T, K], counts[W, E_l] -> row[T, K]: in a part, indices into that part's rows
    "lancet.send_rows": Rule(("t! k!, t! k!, w! e! -> t! k!",), irregular=("t, t, ~ -> t",), routing="rows"),
    # x[T, D], row[T, K] (, weight[T, K]) -> rows[S, D]
    "lancet.dispatch": Rule(
        ("t! d!, t! k! -> r! d!", "t! d!, t! k!, t! k! -> r! d!"),
        irregular=("t, t -> ~", "t, t, t -> ~"),
        row_argument=1,
        most_rows_argument=3,
        num_rows_argument=4,
    ),
    "lancet.exchange_counts": Rule(
        ("w! e! -> w! e!",), irregular=("~ -> ~",), in_experts=True, is_count=True
    ),
    # x[S, D], send counts[W, E_l], receive counts -> y[R, D]
    "lancet.all_to_all": Rule(
        ("r d!, w! e!, w! e! -> r d!",),
        irregular=("~, ~, ~ -> ~",),
        in_experts=True,
        count_arguments=(1, 2),
        to_experts_argument=4,
        num_rows_argument=5,
    ),
    # x[R, D], counts[W, E_l], weight[E_l, D, F] (, bias[E_l, F]) -> y[R, F]
    "lancet.grouped_gemm": Rule(
        ("r d, w! e!, e! d! f! -> r f!", "r d, w! e!, e! d! f!, e! f! -> r f!"),
        irregular=("~, ~, . -> ~", "~, ~, ., . -> ~"),
        in_experts=True,
        count_arguments=(1,),
    ),
    # h[R, F], counts[W, E_l] -> a[R, F]
    "lancet.expert_activation": Rule(
        ("r f!, w! e! -> r g!",),
        irregular=("~, ~ -> ~",),
        in_experts=True,
        count_arguments=(1,),
    ),
    # Backward of the experts: dy, counts, weight -> dx;  x, dy, counts -> dweight;  da, h, counts -> dh
    "lancet.grouped_gemm_dx": Rule(
        ("r f, w! e!, e! d! f -> r d!",), irregular=("~, ~, . -> ~",), in_experts=True, count_arguments=(1,)
    ),
    "lancet.grouped_gemm_dw": Rule(
        ("r+ d!, r+ f!, w! e! -> e! d! f!",),
        irregular=("~, ~, ~ -> +",),
        in_experts=True,
        count_arguments=(2,),
    ),
    "lancet.grouped_gemm_dbias": Rule(
        ("r+ f!, w! e! -> e! f!",), irregular=("~, ~ -> +",), in_experts=True, count_arguments=(1,)
    ),
    "lancet.expert_activation_backward": Rule(
        ("r f!, r g!, w! e! -> r g!",),
        irregular=("~, ~, ~ -> ~",),
        in_experts=True,
        count_arguments=(2,),
    ),
    # y[S, D], row[T, K] (, weight[T, K]) -> out[T, D]
    "lancet.combine": Rule(
        ("r! d!, t! k! -> t! d!", "r! d!, t k!, t k! -> t! d!"), irregular=("~, t -> t", "~, t, t -> t")
    ),
    # Backward of combine's and dispatch's weights: x[T, D], y[S, D], row[T, K] -> dweight[T, K]
    "lancet.combine_dweight": Rule(("t! d!, r! d!, t! k! -> t! k!",), irregular=("t, ~, t -> t",)),
    # x[T, D], expert[T, K], row[T, K], weight[T, K], counts[W, E_l], w1 (, b1), w2 (, b2) -> y[T, D], ticket
    "lancet.fused_experts": Rule(
        (
            "t! d!, t! k!, t! k!, t! k!, w! e!, e! d! h!, e! f! d! -> t! d!, *",
            "t! d!, t! k!, t! k!, t! k!, w! e!, e! d! h!, e! h!, e! f! d!, e! d! -> t! d!, *",
        ),
        irregular=("t, t, t, t, ~, ., . -> t, ^", "t, t, t, t, ~, ., ., ., . -> t, ^"),
        row_argument=2,
        with_backward=True,
    ),
    # dy[T, D], ticket, weight[T, K], w1 (, b1), w2 (, b2) (, fillers' operands [T, A]) (, x[T, D])
    #   -> dx[T, D], dweight[T, K], dw1, dw2 (, db1, db2) (, fillers' results [A, B])
    "lancet.fused_experts_backward": Rule(derived=derived.fused_backward, with_backward=True),
    # dweight[T, K], logits[T, E], expert[T, K] -> dlogits[T, E]
    "lancet.gate_backward": Rule(("t k!, t e!, t k! -> t e!",)),
}
