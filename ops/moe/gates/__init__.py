"""The gates by name, and how to read a gate's spec."""

import ast
import dataclasses
from functools import lru_cache

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.ops.moe.gates.base import Gate
from lancet_kernels.ops.moe.gates.gates import (
    BatchPrioritized,
    ExpertChoice,
    GShard,
    Hash,
    Random,
    Sigmoid,
    Switch,
    TopK,
)

GATES: dict[str, type[Gate]] = {
    gate.name: gate for gate in (Switch, TopK, GShard, BatchPrioritized, ExpertChoice, Hash, Random, Sigmoid)
}


@lru_cache
def parse_gate(spec: str) -> Gate:
    """Read a gate from its spec: a name, or a name with options, as `topk(softmax='after')`.

    Raises: UserError for an unknown name, an unknown option, a value that is no literal or of the wrong type.
    """
    name, bracket, rest = spec.partition("(")
    name = name.strip()
    check_name("gate", name, GATES)
    if not bracket:
        return GATES[name]()
    if ")" not in rest:
        raise UserError(
            f"options of gate {name}",
            got=repr(spec),
            expected="a closing bracket",
            do=f"write {name}, or {name}(option=value)",
        )
    try:
        call = ast.parse(f"gate({rest}", mode="eval").body
        if not isinstance(call, ast.Call):
            raise TypeError("not one pair of parentheses")
        options = {k.arg: _value(GATES[name], k) for k in call.keywords if k.arg is not None}
        if call.args or len(options) < len(call.keywords):
            raise TypeError("options are given by name, each once")
        return GATES[name](**options)
    except UserError:
        raise
    except (SyntaxError, ValueError, TypeError, AttributeError) as error:
        fields = ", ".join(field.name for field in dataclasses.fields(GATES[name])) or "none"
        raise UserError(
            f"options of gate {name}",
            got=repr(spec),
            expected=f"name=value pairs of: {fields}",
            do=f"write them as {name}(option=value)",
        ) from error


def _value(gate: type[Gate], option: ast.keyword) -> object:
    """The value of an option as it was written. Raises: UserError if it is no Python literal."""
    defaults = {field.name: field.default for field in dataclasses.fields(gate)}
    if option.arg not in defaults:
        raise TypeError(f"no option {option.arg}")
    try:
        return ast.literal_eval(option.value)
    except (ValueError, TypeError) as error:
        default = defaults[option.arg]
        raise UserError(
            f"{option.arg} of gate {gate.name}",
            got=ast.unparse(option.value),
            expected="text in quotes" if isinstance(default, str) else "a Python literal",
            do=f"write {gate.name}({option.arg}={default!r}), say",
        ) from error
