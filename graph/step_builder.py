"""How is a training step written down op by op, without torch? Forward ops that push their backward on a
tape.

Every method appends instructions as ahead-of-time autograd would order them: the input gradient (dX) first,
then the weight gradient (dW) beside it. Work is counted in flops, traffic as the bytes of all operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec


class StepBuilder:
    """Collects one training step; `backward` runs the tape, `finish` gives the Program."""

    def __init__(self, name: str, dtype: str):
        self.name, self.dtype = name, dtype
        self.tensors: dict[str, TensorSpec] = {}
        self.instructions: list[Instruction] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.parameters: list[str] = []
        self.phase = Phase.FORWARD
        self._tape: list[Callable[[], None]] = []
        self._gradient: dict[str, str] = {}
        self.weight_gradients: list[tuple[str, str]] = []

    def tensor(self, name: str, *shape: int, dtype: str | None = None, alias_of: str | None = None) -> str:
        """Describe a tensor and give back its name."""
        self.tensors[name] = TensorSpec(name, shape, dtype or self.dtype, alias_of=alias_of)
        return name

    def given(self, name: str, *shape: int, dtype: str | None = None) -> str:
        """A program input: optimizer state or data."""
        self.inputs.append(self.tensor(name, *shape, dtype=dtype))
        return name

    def parameter(self, name: str, *shape: int) -> str:
        """A weight."""
        self.parameters.append(name)
        return self.given(name, *shape)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.tensors[tensor].shape

    def emit(
        self,
        name: str,
        op: str,
        inputs: list[str],
        outputs: list[str],
        *,
        flops: float = 0.0,
        bytes: float | None = None,
        kind: Kind = Kind.COMPUTE,
        mutates: tuple[str, ...] = (),
        **attributes: Any,
    ) -> None:
        """Append one instruction. Traffic defaults to the bytes of all operands."""
        if bytes is None:
            bytes = float(sum(self.tensors[t].content_bytes for t in (*inputs, *outputs)))
        self.instructions.append(
            Instruction(
                name,
                op,
                tuple(inputs),
                tuple(outputs),
                kind,
                self.phase,
                float(flops),
                float(bytes),
                mutates=mutates,
                attributes=attributes,
            )
        )

    def on_backward(self, step: Callable[[], None]) -> None:
        """What the backward pass does for the op that was just written."""
        self._tape.append(step)

    def gradient(self, tensor: str) -> str:
        """The gradient that has reached a tensor."""
        return self._gradient[tensor]

    def send_gradient(self, tensor: str, gradient: str) -> None:
        """Add a gradient to a tensor's; a second one is summed up by an instruction."""
        if tensor in self._gradient:
            total = self.tensor(f"{gradient}.sum", *self.shape(tensor), dtype=self.tensors[tensor].dtype)
            self.emit(f"add:{total}", "aten.add", [self._gradient[tensor], gradient], [total])
            gradient = total
        self._gradient[tensor] = gradient

    def send_weight_gradient(self, weight: str, gradient: str) -> None:
        """The gradient of a parameter is complete: the all-reduce and the optimizer want it."""
        self.weight_gradients.append((weight, gradient))

    def backward(self) -> None:
        """Run the tape: the instructions from here on belong to the backward pass."""
        self.phase = Phase.BACKWARD
        while self._tape:
            self._tape.pop()()

    def finish(self) -> Program:
        return Program(self.name, self.instructions, self.tensors, self.inputs, self.outputs, self.parameters)

    # Ops that every Transformer has.

    def view(self, name: str, x: str, *shape: int) -> str:
        y = self.tensor(name, *shape, dtype=self.tensors[x].dtype, alias_of=x)
        self.emit(name, "aten.view", [x], [y], bytes=0)

        def step() -> None:
            dx = self.tensor(
                f"d_{name}", *self.shape(x), dtype=self.tensors[x].dtype, alias_of=self.gradient(y)
            )
            self.emit(dx, "aten.view", [self.gradient(y)], [dx], bytes=0)
            self.send_gradient(x, dx)

        self.on_backward(step)
        return y

    def linear(self, name: str, x: str, features: int, *, bias: bool = True) -> str:
        """x (..., D) to (..., F): a view to rows, one GEMM, a view back; backward dX, dW, db apart."""
        *leading, width = self.shape(x)
        rows = math.prod(leading)
        weight = self.parameter(f"{name}.weight", width, features)
        offset = self.parameter(f"{name}.bias", features) if bias else None
        x_td = self.view(f"{name}.rows", x, rows, width) if len(leading) > 1 else x
        y = self.tensor(f"{name}.out", rows, features)
        work = 2.0 * rows * width * features
        if offset:
            self.emit(name, "aten.addmm", [offset, x_td, weight], [y], flops=work)
        else:
            self.emit(name, "aten.mm", [x_td, weight], [y], flops=work)

        def step() -> None:
            dy = self.gradient(y)
            dx = self.tensor(f"d_{name}.x", rows, width)
            self.emit(f"{name}.dX", "aten.mm", [dy, weight], [dx], flops=work)
            dweight = self.tensor(f"d_{name}.weight", width, features)
            self.emit(f"{name}.dW", "aten.mm", [x_td, dy], [dweight], flops=work)
            self.send_weight_gradient(weight, dweight)
            if offset:
                doffset = self.tensor(f"d_{name}.bias", features)
                self.emit(f"{name}.db", "aten.sum", [dy], [doffset], flops=rows * features, dims=[0])
                self.send_weight_gradient(offset, doffset)
            self.send_gradient(x_td, dx)

        self.on_backward(step)
        return self.view(f"{name}.y", y, *leading, features) if len(leading) > 1 else y

    def layer_norm(self, name: str, x: str) -> str:
        *leading, width = self.shape(x)
        scale, shift = self.parameter(f"{name}.weight", width), self.parameter(f"{name}.bias", width)
        y = self.tensor(f"{name}.y", *leading, width)
        mean = self.tensor(f"{name}.mean", *leading, 1, dtype="float32")
        rstd = self.tensor(f"{name}.rstd", *leading, 1, dtype="float32")
        self.emit(name, "aten.native_layer_norm", [x, scale, shift], [y, mean, rstd])

        def step() -> None:
            dx = self.tensor(f"d_{name}.x", *leading, width)
            dscale, dshift = (
                self.tensor(f"d_{name}.weight", width),
                self.tensor(f"d_{name}.bias", width),
            )
            inputs = [self.gradient(y), x, mean, rstd, scale]
            self.emit(f"{name}.backward", "aten.native_layer_norm_backward", inputs, [dx, dscale, dshift])
            self.send_weight_gradient(scale, dscale)
            self.send_weight_gradient(shift, dshift)
            self.send_gradient(x, dx)

        self.on_backward(step)
        return y

    def gelu(self, name: str, x: str) -> str:
        y = self.tensor(f"{name}.y", *self.shape(x))
        self.emit(name, "aten.gelu", [x], [y])

        def step() -> None:
            dx = self.tensor(f"d_{name}.x", *self.shape(x))
            self.emit(f"{name}.backward", "aten.gelu_backward", [self.gradient(y), x], [dx])
            self.send_gradient(x, dx)

        self.on_backward(step)
        return y

    def add(self, name: str, a: str, b: str) -> str:
        y = self.tensor(f"{name}.y", *self.shape(a))
        self.emit(name, "aten.add", [a, b], [y])

        def step() -> None:
            self.send_gradient(a, self.gradient(y))
            self.send_gradient(b, self.gradient(y))

        self.on_backward(step)
        return y

    def attention(self, name: str, qkv: str, heads: int) -> str:
        """qkv (B, S, 3 D) to (B, S, D): split, heads to the front, causal attention, heads back."""
        batch, length, triple = self.shape(qkv)
        width = triple // 3
        per_head = width // heads
        parts = [
            self.tensor(f"{name}.{n}", batch, length, width, alias_of=qkv) for n in ("query", "key", "value")
        ]
        self.emit(f"{name}.split", "aten.split", [qkv], parts, bytes=0, dim=2)
        headed = []
        for part in parts:
            v = self.tensor(f"{part}.view", batch, length, heads, per_head, alias_of=part)
            self.emit(v, "aten.view", [part], [v], bytes=0)
            t = self.tensor(f"{part}.heads", batch, heads, length, per_head, alias_of=v)
            self.emit(t, "aten.transpose", [v], [t], bytes=0, dims=[1, 2], swap=True)
            headed.append(t)
        out = self.tensor(f"{name}.out", batch, heads, length, per_head)
        lse = self.tensor(f"{name}.logsumexp", batch, heads, length, dtype="float32")
        # Causal: half of the 4 B S^2 D flops of the two products.
        work = 2.0 * batch * length * length * width
        self.emit(name, "aten._scaled_dot_product_flash_attention", headed, [out, lse], flops=work)
        back = self.tensor(f"{name}.back", batch, length, heads, per_head, alias_of=out)
        self.emit(back, "aten.transpose", [out], [back], bytes=0, dims=[1, 2], swap=True)
        y = self.tensor(f"{name}.y", batch, length, width, alias_of=back)
        self.emit(y, "aten.view", [back], [y], bytes=0)

        def step() -> None:
            dqkv = self.tensor(f"d_{name}.qkv", batch, length, triple)
            inputs = [self.gradient(y), *headed, out, lse]
            self.emit(f"{name}.backward", "aten.attention_backward", inputs, [dqkv], flops=2.5 * work)
            self.send_gradient(qkv, dqkv)

        self.on_backward(step)
        return y
