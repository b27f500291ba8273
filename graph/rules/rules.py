"""Rules: along which dimensions an op may be cut into parts, as einsum-like equations (`graph.ops` has all).

Lancet's partition constraints (section 5.2) follow from the rules: a matrix product `"t d, d f -> t f"` may
be cut along t (first operand and result) or along f (second operand and result). An op without a rule is
never partitioned.

MoE ops have further ways to be cut. A part of the batch sends between 0 and C rows to an expert, so after the
dispatch tensors are *irregular*: each part has some of the rows, and together they have all. In a range that
has only all-to-alls and experts, the rows `r` are cut instead: each part has a window of the slots of every
expert (`ops.moe.dispatch`), which is not a slice of the tensor.

A rule also says which arguments of an op differ between parts (shape, sizes, counts, carried tensors);
`schedules.rewrite.cut` uses this.

The forms in which a part, or a rank, holds a tensor; plans and files use them, too:

whole        the whole tensor (HiDup: Full)
cut n        a slice along dimension n (HiDup: Gather(n))
sliced n     computed whole; parts read slices along dimension n
partial      a summand of full size; the whole tensor is the sum (HiDup: Reduce)
irregular    some of the rows; their number is only known at run time (Lancet: A_irr)
window       the rows in a window of each expert's slots, the same window on every rank (Tutel)
carried      passed from part to part; the last part's is the whole batch's (Lancet, section 2.3)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program import Instruction, TensorSpec
from lancet_kernels.graph.rules.derived import Derivation, Equation, Shape, parse


class Form(NamedTuple):
    """`dimension` is the dimension of the slice, for the kinds "cut" and "sliced"; None for the others."""

    kind: str
    dimension: int | None = None

    @property
    def is_cut(self) -> bool:
        """Do parts have a slice along a dimension?"""
        return self.dimension is not None

    @property
    def is_made_in_parts(self) -> bool:
        """Does the op that computes such a tensor run part by part?"""
        return self.kind not in ("whole", "sliced")

    @property
    def of_reader(self) -> Form:
        """The form in which a part reads a tensor of this form."""
        return cut_along(self.dimension) if self.kind == "sliced" and self.dimension is not None else self

    def __str__(self) -> str:
        """The text in JSON. Example: `cut 0`."""
        return self.kind if self.dimension is None else f"{self.kind} {self.dimension}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """The form from the text of `str`. Raises: UserError."""
        kind, _, dimension = str(text).partition(" ")
        if kind in ("cut", "sliced") and dimension.isdigit():
            return Form(kind, int(dimension))
        if text in _PLAIN:
            return _PLAIN[text]
        raise UserError(
            "form of a tensor",
            got=repr(text),
            expected=f"cut N, sliced N, {', '.join(_PLAIN)}",
            do="plan again",
        )


WHOLE = Form("whole")
PARTIAL = Form("partial")
IRREGULAR = Form("irregular")
WINDOW = Form("window")
CARRIED = Form("carried")
_PLAIN = {form.kind: form for form in (WHOLE, PARTIAL, IRREGULAR, WINDOW, CARRIED)}

Forms = Mapping[str, Form]
"""Forms by tensor name; a tensor without an entry is whole."""


@cache
def cut_along(dimension: int) -> Form:
    """The form "cut": a slice along a dimension."""
    return Form("cut", dimension)


def sliced(dimension: int) -> Form:
    """The form "sliced": computed whole; parts read slices along a dimension."""
    return Form("sliced", dimension)


def any_made_in_parts(forms: Forms, tensors: Iterable[str]) -> bool:
    """Is any of these tensors computed part by part?"""
    return any(forms.get(t, WHOLE).is_made_in_parts for t in tensors)


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
    carries: (output, argument's name): the output of a part is this argument of the next part.

    Arguments that differ between parts, by their names in the op's schema:
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
    carries: tuple[tuple[int, str], ...] = ()
    shape_argument: str = ""
    count_arguments: tuple[str, ...] = ()
    num_rows_argument: str = ""
    most_rows_argument: str = ""
    to_experts_argument: str = ""
    is_count: bool = False
    routing: str | None = None
    reduction_argument: str = ""
    averages: bool = False
    row_argument: str = ""
    with_backward: bool = False

    def arguments_of_slice(
        self, args: Sequence, names: Sequence[str], shape: Sequence[int] | None, *, sums: bool = True
    ) -> list:
        """The arguments with which the op computes one slice of its result.

        Args:
            names: of the arguments, in the op's schema.
            shape: of the slice; None: of the whole result.
            sums: sum a loss whose mean is the total of the slices' sums, divided by their weights.
        """
        own = list(args)
        for position, name in enumerate(names[: len(own)]):
            if name == self.shape_argument and shape is not None:
                own[position] = list(shape)
            elif sums and name == self.reduction_argument and own[position] == MEAN:
                own[position] = SUM
        return own

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
                way = tuple(
                    _MARKS.get(mark) or self._form(tensors[t].shape, dims, mark)
                    for mark, (t, dims) in zip(marks, operands, strict=True)
                )
                # One token alone has no parts.
                if way.count(WHOLE) == marks.count("."):
                    result.append(way)
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
