"""The function that torch traces for a module, and the expressions by which a trace names what it reads."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch._dynamo.convert_frame import get_traced_fn
from torch._dynamo.guards import _get_closure_vars


class TracedFunction:
    """The forward of a module, or the call around it where the module has hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._function = get_traced_fn(module)[0]
        self.code = self._function.__code__
        if self.code.co_argcount:
            self._self_name = self.code.co_varnames[0]
            self._self_expression = f"L['{self._self_name}']"
        else:
            # A wrapper (*args, **by_name).
            self._self_name = self.code.co_varnames[self.code.co_kwonlyargcount]
            self._self_expression = f"L['{self._self_name}'][0]"

    def locals(self, module: nn.Module) -> dict[str, object]:
        """The local variables that expressions refer to, without the arguments of the call."""
        is_argument = self._self_expression == f"L['{self._self_name}']"
        by_name: dict[str, object] = {self._self_name: module if is_argument else (module,)}
        cells = self._function.__closure__ or ()
        for name, cell in zip(self.code.co_freevars, cells, strict=True):
            by_name[name] = cell.cell_contents
        return by_name

    def value(self, expression: Any, module: nn.Module) -> Any:
        """What an expression, as text or compiled, stands for now."""
        scope = {"L": self.locals(module), "G": self._function.__globals__}
        return eval(expression, _get_closure_vars(), scope)

    def reads_arguments(self, expression: str) -> bool:
        """Does an expression depend on the arguments of the call, rather than on the module, a variable
        around it or one of a Python module?"""
        closure = {f"L['{name}']" for name in self.code.co_freevars}
        rest = expression.replace(self._self_expression, "")
        return not set(re.findall(r"L\['\w+'\]", rest)) <= closure

    def plain(self, code: str) -> str:
        """An expression of torch's guards, as a user would write it.

        `L['self']._modules['a'].p == 0.1` -> `a.p == 0.1`
        """
        code = code.replace(self._self_expression, "")
        code = re.sub(r"^not ___dict_contains\('(\w+)', (.*?)\.?__dict__\)$", r"no \2.\1", code)
        code = re.sub(r"(?:\._modules|\._parameters|\._buffers|\.__dict__)?\['(\w+)'\]", r".\1", code)
        code = re.sub(r"___check_type_id\((.*?), \d+\).*", r"type of \1", code)
        code = re.sub(r"___check_obj_id\((.*?), \d+\).*", r"identity of \1", code)
        code = re.sub(r"^not (.*)\._(\w+_hooks)$", r"no \2 on \1", code)
        return re.sub(r"(?:(?<![\w)\]'])|(?<= '))\.(?=[A-Za-z_])", "", code)
