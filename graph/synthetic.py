"""What does a training step of the paper's models look like? Programs of GPT-2 MoE without torch or GPU.

Section 7: GPT-2 in which every other feed-forward layer is an MoE layer, two experts per GPU, sequences of
512, SGD with momentum, the batch that fits the device. Assumed where the paper is silent: float32 (on p3dn
it gives the share of all-to-all, about 40 %, and its ratio to the experts, about 3.4, that the paper shows;
float16 gives twice that), top-1, capacity factor 1.25, one gradient all-reduce per layer, and all-to-alls
that carry the full capacity (`padded=False`: only real rows, as this library's own all-to-all sends them).
Embedding and output projection share one weight, as in GPT-2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.graph.step_builder import StepBuilder


@dataclass(frozen=True)
class ModelShape:
    """What the step's cost depends on. `moe_every` 2 makes layers 1, 3, 5, ... MoE layers."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    sequence: int = 512
    moe_every: int = 2
    experts_per_gpu: int = 2
    experts_per_token: int = 1
    capacity_factor: float | None = 1.25
    """None: dropless."""
    padded: bool = True
    """Do all-to-alls and experts work on the full capacity, if there is one, or on the rows alone?"""

    def rows(self, tokens: int, experts: int) -> int:
        """Rows that one rank sends, padding included, if tokens are spread evenly."""
        choices = tokens * self.experts_per_token
        if self.capacity_factor is None:
            return choices
        slots = experts * max(1, math.ceil(self.capacity_factor * choices / experts))
        return slots if self.padded else min(slots, choices)


MODELS = {
    "gpt2-s-moe": ModelShape("gpt2-s-moe", layers=12, width=768, heads=12),
    "gpt2-l-moe": ModelShape("gpt2-l-moe", layers=24, width=1024, heads=16),
}
PAPER_BATCH = {
    ("p4de", "gpt2-s-moe"): 24,
    ("p4de", "gpt2-l-moe"): 48,
    ("p3dn", "gpt2-s-moe"): 16,
    ("p3dn", "gpt2-l-moe"): 8,
}
"""Sequences per GPU in the paper's experiments, by cluster and model."""

GATES = {
    "switch": True,
    "topk": True,
    "gshard": False,
    "batch-prioritized": False,
    "expert-choice": False,
    "hash": True,
    "random": True,
    "sigmoid": True,
}
"""Can the gate decide from a part of the batch? The gates of `lancet_kernels.ops`, named without torch."""


def training_step(
    model: ModelShape | str, *, gpus: int, batch: int, gate: str = "switch", dtype: str = "float32"
) -> Program:
    """One rank's training step with `batch` sequences: forward, backward, all-reduces, optimizer.

    Raises:
        UserError: an unknown model or gate, or a size below one.
    """
    if isinstance(model, str):
        if model not in MODELS:
            raise UserError(
                "model", got=model, expected=f"one of {', '.join(MODELS)}", do="name one of these"
            )
        model = MODELS[model]
    if gate not in GATES:
        raise UserError("gate", got=gate, expected=f"one of {', '.join(GATES)}", do="name one of these")
    if gpus < 1 or batch < 1:
        raise UserError("sizes", got=(gpus, batch), expected="gpus and batch >= 1", do="correct them")
    step = _TrainingStep(model, gpus, batch, GATES[gate], dtype)
    return step.write()


class _TrainingStep:
    def __init__(self, model: ModelShape, gpus: int, batch: int, partitionable: bool, dtype: str):
        self.model, self.gpus, self.batch, self.partitionable = model, gpus, batch, partitionable
        self.b = StepBuilder(f"{model.name}, {gpus} GPUs, batch {batch}", dtype)
        self.tokens = batch * model.sequence
        # Parameter to the gradient the optimizer reads: reduced over the ranks, or an expert's own.
        self.final_gradient: dict[str, str] = {}

    def write(self) -> Program:
        b, m = self.b, self.model
        h = self._embed()
        for layer in range(m.layers):
            name = f"layer{layer}"
            self._on_backward_done(name)
            x = b.layer_norm(f"{name}.norm1", h)
            qkv = b.linear(f"{name}.qkv", x, 3 * m.width)
            x = b.attention(f"{name}.attention", qkv, m.heads)
            x = b.linear(f"{name}.projection", x, m.width)
            h = b.add(f"{name}.residual1", h, x)
            x = b.layer_norm(f"{name}.norm2", h)
            is_moe = layer % m.moe_every == m.moe_every - 1
            x = self._moe(f"{name}.moe", x) if is_moe else self._feed_forward(name, x)
            h = b.add(f"{name}.residual2", h, x)
        self._head(h)
        b.backward()
        self._optimizer()
        return b.finish()

    def _embed(self) -> str:
        b, m = self.b, self.model
        self._on_backward_done("embedding")
        ids = b.given("ids", self.batch, m.sequence, dtype="int64")
        table = b.parameter("embedding.weight", m.vocabulary, m.width)
        places = b.parameter("position.weight", m.sequence, m.width)
        found = b.tensor("embedding.found", self.batch, m.sequence, m.width)
        h = b.tensor("embedding.out", self.batch, m.sequence, m.width)
        rows = b.tensors[h].content_bytes
        b.emit("embedding", "aten.embedding", [table, ids], [found], bytes=2 * rows)
        b.emit("embedding.position", "aten.add", [found, places], [h])

        def step() -> None:
            dplaces = b.tensor("d_position.weight", m.sequence, m.width)
            b.emit("embedding.position.dW", "aten.sum", [b.gradient(h)], [dplaces], dims=[0])
            b.send_weight_gradient(places, dplaces)
            grad = b.tensor("d_embedding.rows", m.vocabulary, m.width)
            inputs = [b.gradient(h), ids]
            traffic = rows + b.tensors[grad].content_bytes
            b.emit("embedding.dW", "aten.embedding_dense_backward", inputs, [grad], bytes=traffic)
            total = b.tensor("d_embedding.weight", m.vocabulary, m.width)
            b.emit("embedding.dW.sum", "aten.add", ["d_head.weight", grad], [total])
            b.send_weight_gradient(table, total)

        b.on_backward(step)
        return h

    def _feed_forward(self, name: str, x: str) -> str:
        b = self.b
        x = b.linear(f"{name}.up", x, 4 * self.model.width)
        x = b.gelu(f"{name}.gelu", x)
        return b.linear(f"{name}.down", x, self.model.width)

    def _head(self, h: str) -> None:
        b, m = self.b, self.model
        self._on_backward_done("head")
        logits = self._output_projection(b.layer_norm("final_norm", h))
        loss = b.tensor("loss", 1, dtype="float32")
        target = b.given("target", self.batch, m.sequence, dtype="int64")
        size = b.tensors[logits].content_bytes
        lse = b.tensor("logsumexp", self.batch, m.sequence, dtype="float32")
        b.emit("cross_entropy", "lancet.cross_entropy", [logits, target], [loss, lse], bytes=3 * size)
        b.outputs.append(loss)

        def step() -> None:
            dlogits = b.tensor("d_logits", *b.shape(logits))
            inputs = [logits, target, lse]
            b.emit(
                "cross_entropy.backward", "lancet.cross_entropy_backward", inputs, [dlogits], bytes=2 * size
            )
            b.send_gradient(logits, dlogits)

        b.on_backward(step)

    def _output_projection(self, x: str) -> str:
        """By the embedding's weight; its gradient waits for the embedding's own."""
        b, m = self.b, self.model
        table, shape = "embedding.weight", b.shape(x)
        x_td = b.view("head.rows", x, self.tokens, m.width)
        weight = b.tensor("head.weight", m.width, m.vocabulary, alias_of=table)
        b.emit("head.t", "aten.t", [table], [weight], bytes=0)
        y = b.tensor("head.out", self.tokens, m.vocabulary)
        work = 2.0 * self.tokens * m.width * m.vocabulary
        b.emit("head", "aten.mm", [x_td, weight], [y], flops=work)

        def step() -> None:
            dx = b.tensor("d_head.x", self.tokens, m.width)
            b.emit("head.dX", "aten.mm", [b.gradient(y), table], [dx], flops=work)
            grad = b.tensor("d_head.weight", m.vocabulary, m.width)
            dy_t = b.tensor("d_head.out.t", m.vocabulary, self.tokens, alias_of=b.gradient(y))
            b.emit(dy_t, "aten.t", [b.gradient(y)], [dy_t], bytes=0)
            b.emit("head.dW", "aten.mm", [dy_t, x_td], [grad], flops=work)
            b.send_gradient(x_td, dx)

        b.on_backward(step)
        return b.view("head.y", y, *shape[:2], m.vocabulary)

    def _moe(self, name: str, x: str) -> str:
        b, m = self.b, self.model
        width, tokens, k = m.width, self.tokens, m.experts_per_token
        experts = m.experts_per_gpu * self.gpus
        x_td = b.view(f"{name}.rows", x, tokens, width)
        logits = b.linear(f"{name}.router", x_td, experts, bias=False)
        used = b.given(f"{name}.used", experts, dtype="int32")
        expert, slot = (b.tensor(f"{name}.{n}", tokens, k, dtype="int32") for n in ("expert", "slot"))
        weight = b.tensor(f"{name}.weight", tokens, k, dtype="float32")
        after = b.tensor(f"{name}.used_after", experts, dtype="int32")
        b.emit(
            f"{name}.gate",
            "lancet.gate",
            [logits, used],
            [expert, slot, weight, after],
            partitionable=self.partitionable,
        )
        self._on_gate_backward(name, logits, weight)
        counts = b.tensor(f"{name}.counts", self.gpus, m.experts_per_gpu, dtype="int32")
        b.emit(f"{name}.kept_counts", "lancet.kept_counts", [after], [counts])
        row = b.tensor(f"{name}.row", tokens, k, dtype="int32")
        b.emit(f"{name}.send_rows", "lancet.send_rows", [expert, slot, counts], [row])
        sent = b.tensor(f"{name}.sent", m.rows(tokens, experts), width)
        b.emit(f"{name}.dispatch", "lancet.dispatch", [x_td, row], [sent])
        received_counts = b.tensor(f"{name}.received_counts", self.gpus, m.experts_per_gpu, dtype="int32")
        b.emit(
            f"{name}.exchange_counts",
            "lancet.exchange_counts",
            [counts],
            [received_counts],
            kind=Kind.OTHER_COMMUNICATION,
            bytes=b.tensors[counts].content_bytes,
            collective="all_to_all",
        )
        self._on_dispatch_backward(name, x_td, sent)
        received = self._all_to_all(f"{name}.all_to_all_dispatch", sent, counts, received_counts)
        hidden = self._experts(f"{name}.expert_up", received, 4 * width, received_counts)
        active = self._activation(f"{name}.expert_activation", hidden, received_counts)
        done = self._experts(f"{name}.expert_down", active, width, received_counts)
        returned = self._all_to_all(f"{name}.all_to_all_combine", done, received_counts, counts)
        return self._combine(name, returned, [row, weight], x)

    def _on_gate_backward(self, name: str, logits: str, weight: str) -> None:
        b = self.b

        def step() -> None:
            grad = b.tensor(f"d_{name}.logits", *b.shape(logits))
            b.emit(f"{name}.gate.backward", "lancet.gate_backward", [b.gradient(weight), logits], [grad])
            b.send_gradient(logits, grad)

        b.on_backward(step)

    def _on_dispatch_backward(self, name: str, x_td: str, sent: str) -> None:
        b = self.b

        def step() -> None:
            grad = b.tensor(f"d_{name}.x", *b.shape(x_td))
            inputs = [b.gradient(sent), f"{name}.row"]
            b.emit(f"{name}.dispatch.backward", "lancet.dispatch_backward", inputs, [grad])
            b.send_gradient(x_td, grad)

        b.on_backward(step)

    def _all_to_all(self, name: str, x: str, counts: str, back: str) -> str:
        b = self.b
        y = b.tensor(f"{name}.y", *b.shape(x))
        size = b.tensors[x].content_bytes
        b.emit(name, "lancet.all_to_all", [x, counts, back], [y], kind=Kind.ALL_TO_ALL, bytes=size)

        def step() -> None:
            dx = b.tensor(f"d_{name}.x", *b.shape(x))
            inputs = [b.gradient(y), back, counts]
            b.emit(f"{name}.backward", "lancet.all_to_all", inputs, [dx], kind=Kind.ALL_TO_ALL, bytes=size)
            b.send_gradient(x, dx)

        b.on_backward(step)
        return y

    def _experts(self, name: str, x: str, features: int, counts: str) -> str:
        b = self.b
        rows, width = b.shape(x)
        local = self.model.experts_per_gpu
        weight = b.parameter(f"{name}.weight", local, width, features)
        y = b.tensor(f"{name}.y", rows, features)
        work = 2.0 * rows * width * features
        b.emit(name, "lancet.grouped_gemm", [x, counts, weight], [y], flops=work)

        def step() -> None:
            dy = b.gradient(y)
            dx = b.tensor(f"d_{name}.x", *b.shape(x))
            b.emit(f"{name}.dX", "lancet.grouped_gemm_dx", [dy, counts, weight], [dx], flops=work)
            grad = b.tensor(f"d_{name}.weight", local, width, features)
            b.emit(f"{name}.dW", "lancet.grouped_gemm_dw", [x, dy, counts], [grad], flops=work)
            b.outputs.append(grad)
            b.send_weight_gradient(weight, grad)
            b.send_gradient(x, dx)

        b.on_backward(step)
        return y

    def _activation(self, name: str, x: str, counts: str) -> str:
        b = self.b
        y = b.tensor(f"{name}.y", *b.shape(x))
        b.emit(name, "lancet.expert_activation", [x, counts], [y])

        def step() -> None:
            dx = b.tensor(f"d_{name}.x", *b.shape(x))
            inputs = [b.gradient(y), x, counts]
            b.emit(f"{name}.backward", "lancet.expert_activation_backward", inputs, [dx])
            b.send_gradient(x, dx)

        b.on_backward(step)
        return y

    def _combine(self, name: str, returned: str, routing: list[str], like: str) -> str:
        b = self.b
        out = b.tensor(f"{name}.out", self.tokens, self.model.width)
        b.emit(f"{name}.combine", "lancet.combine", [returned, *routing], [out])

        def step() -> None:
            grad = b.tensor(f"d_{name}.returned", *b.shape(returned))
            dweight = b.tensor(f"d_{name}.gate_weight", *b.shape(routing[1]), dtype="float32")
            inputs = [b.gradient(out), returned, *routing]
            b.emit(f"{name}.combine.backward", "lancet.combine_backward", inputs, [grad, dweight])
            b.send_gradient(returned, grad)
            b.send_gradient(routing[1], dweight)

        b.on_backward(step)
        return b.view(f"{name}.y", out, *b.shape(like))

    def _on_backward_done(self, name: str) -> None:
        """The gradients of replicated parameters that are complete by now travel in one bucket."""
        b = self.b
        final = self.final_gradient

        def step() -> None:
            ready = [(w, g) for w, g in b.weight_gradients if w not in final]
            shared = [(w, g) for w, g in ready if ".expert_" not in w]
            final.update(ready)
            if shared:
                inputs = [g for _, g in shared]
                outputs = [b.tensor(f"{g}.mean", *b.shape(g), alias_of=g) for g in inputs]
                final.update(zip([w for w, _ in shared], outputs, strict=True))
                size = sum(b.tensors[g].content_bytes for g in inputs)
                b.emit(
                    f"{name}.all_reduce",
                    "lancet.all_reduce",
                    inputs,
                    outputs,
                    kind=Kind.ALL_REDUCE,
                    bytes=size,
                )

        b.on_backward(step)

    def _optimizer(self) -> None:
        """SGD with momentum, one instruction per parameter: reads three tensors, writes two."""
        b = self.b
        b.phase = Phase.OPTIMIZER
        for weight, gradient in self.final_gradient.items():
            momentum = b.given(f"{weight}.momentum", *b.shape(weight), dtype="float32")
            updated = b.tensor(f"{weight}.updated", *b.shape(weight), alias_of=weight)
            b.emit(
                f"{weight}.sgd",
                "lancet.sgd",
                [gradient, weight, momentum],
                [updated],
                bytes=b.tensors[weight].content_bytes * 3 + b.tensors[momentum].content_bytes * 2,
                mutates=(weight, momentum),
            )
            b.outputs.append(updated)
