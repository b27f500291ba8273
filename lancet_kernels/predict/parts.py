"""The parts of a model, each captured alone: the embedding, one layer of each kind, the head with the loss.

A model with 61 layers has two or three kinds of layers; each is captured once, on fake ranks, with fake
tensors at full size. `step` repeats them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.capture.captured_graph import (
    input_position,
    is_tangent,
    output_node,
    state_name,
)
from lancet_kernels.graph.capture.garbage import without_garbage_collection
from lancet_kernels.graph.from_fx import program_from_fx, tensor_names
from lancet_kernels.graph.program.program import Program, TensorSpec
from lancet_kernels.layer.model_layers import expert_parameters
from lancet_kernels.predict import attention
from lancet_kernels.predict.fake_ranks import fake_ranks, without_contents
from lancet_kernels.transformers.convert import convert


@dataclass(frozen=True)
class Parameter:
    """A parameter of a part: how many numbers this rank has of it (0: it is the embedding's, which the head
    shares), and where its gradient is computed."""

    numbers: int
    is_expert: bool
    gradient: str
    """The tensor; "": it gets none."""


@dataclass(frozen=True)
class Part:
    """Forward and backward of a part as one Program.

    takes, gives: the activation that it reads and the one that it returns; gets, returns: the gradient of
    what it gives, and of what it takes. "": none. parameters: by tensor.
    """

    name: str
    program: Program
    takes: str
    gives: str
    gets: str
    returns: str
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True)
class ModelParts:
    """A model as parts. layers: the number of the kind of each layer, in order."""

    name: str
    embedding: Part
    kinds: tuple[Part, ...]
    layers: tuple[int, ...]
    head: Part
    experts: int
    """Experts in all of an MoE layer; 0: a dense model."""

    @property
    def chain(self) -> list[Part]:
        """All parts in the order of the forward."""
        return [self.embedding, *(self.kinds[kind] for kind in self.layers), self.head]


def load_config(path: str | Path) -> Any:
    """The transformers configuration in a `config.json`, or in a folder with one. Nothing is downloaded.

    Raises: UserError for a missing file, or a model type that this transformers does not know.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UserError(
            "--hf", got="no transformers", expected="it installed", do="install transformers"
        ) from error
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        # A quantized checkpoint says nothing about how the model is trained.
        data.pop("quantization_config", None)
        return AutoConfig.for_model(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            "--hf", got=f"{path} ({text})", expected="the config.json of a model of transformers",
            do="give the file of the model's repository",
        ) from error  # fmt: skip


def number_of_experts(config: Any) -> int:
    """Experts in all of an MoE layer; 0: a dense model."""
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 0


@without_garbage_collection()
def model_parts(config: Any, expert_ranks: int, batch: int, sequence: int) -> ModelParts:
    """Capture the parts of a causal language model for `batch` sequences on a rank.

    Args: expert_ranks: how many ranks share one set of experts.
    Raises: UserError for experts that the ranks do not divide, and for blocks that cannot be converted.
    """
    experts = number_of_experts(config)
    check_experts(experts, expert_ranks)
    attention.register()
    # transformers asks no server, whatever the environment says.
    with fake_ranks(expert_ranks), mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        model = _meta_model(config)
        kinds, layers = _kinds_of(model)
        base = model.get_decoder()
        base.layers = nn.ModuleList([base.layers[layers.index(kind)] for kind in range(kinds)])
        _shorten(model.config, [layers.index(kind) for kind in range(kinds)])
        if experts:
            convert(model, strict=True)
        with without_contents():
            model.to_empty(device="cpu")
            ids = torch.empty(batch, sequence, dtype=torch.int64)
            calls = _layer_calls(base, ids)
            hidden = torch.empty(
                batch, sequence, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True
            )
        embedding = captured_part("embedding", base.embed_tokens, (ids,))
        parts = [
            captured_part(f"layer{kind}", _Called(layer, *calls[kind]), (hidden, *_tensors(calls[kind])))
            for kind, layer in enumerate(base.layers)
        ]
        head = captured_part("head", _Head(base.norm, model.lm_head), (hidden, ids))
        if getattr(config, "tie_word_embeddings", False):
            # The weight that it shares, which is as large as the embedding, counts there.
            shared = model.lm_head.weight.numel()
            own = {t: replace(p, numbers=0) if p.numbers == shared else p for t, p in head.parameters.items()}
            head = replace(head, parameters=own)
    return ModelParts(
        getattr(config, "model_type", "model"), embedding, tuple(parts), tuple(layers), head, experts
    )


def on_other_ranks(parts: ModelParts, before: int, after: int) -> ModelParts:
    """The parts as captured with experts over `before` ranks, with experts over `after` ranks.

    Only the experts of a rank differ: as many rows go through more or fewer of them.
    """

    def one(part: Part) -> Part:
        program, owner = part.program, part.program.storage
        tensors, parameters = dict(program.tensors), {}
        scaled: set[str] = set()
        for t, parameter in part.parameters.items():
            if parameter.is_expert:
                scaled |= {owner[t], owner.get(parameter.gradient, owner[t])}
                parameter = replace(parameter, numbers=parameter.numbers * before // after)
            parameters[t] = parameter
        more = dict.fromkeys(tensors, 0)
        for t in scaled:
            first, *rest = tensors[t].shape
            spec = TensorSpec(t, (first * before // after, *rest), tensors[t].dtype)
            more[t], tensors[t] = spec.content_bytes - tensors[t].content_bytes, spec
        instructions = tuple(
            replace(i, bytes=i.bytes + sum(more[t] for t in (*i.inputs, *i.outputs)))
            for i in program.instructions
        )
        return replace(
            part, parameters=parameters, program=replace(program, instructions=instructions, tensors=tensors)
        )

    return parts if before == after else replace(parts, kinds=tuple(map(one, parts.kinds)))


def check_experts(experts: int, ranks: int) -> None:
    """Raise UserError unless the ranks can share the experts."""
    if ranks > 1 and (not experts or experts % ranks):
        raise UserError(
            "--experts-over", got=f"{ranks} ranks for {experts or 'no'} experts",
            expected="a divisor of the number of experts", do="choose another number of ranks",
        )  # fmt: skip


def _meta_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    config._attn_implementation = attention.IMPLEMENTATION
    config.use_cache = False
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention.IMPLEMENTATION
            )
    except (ValueError, KeyError) as error:
        raise UserError(
            "--hf", got=f"model type {config.model_type} ({str(error).splitlines()[0]})",
            expected="a causal language model", do="give the config of one",
        ) from error  # fmt: skip


def _kinds_of(model: Any) -> tuple[int, list[int]]:
    """How many kinds of layers there are, and the kind of each layer: alike are layers with the same modules,
    shapes and attention window."""
    seen: dict[object, int] = {}
    layers = []
    types = getattr(model.config, "layer_types", None)
    for index, layer in enumerate(model.get_decoder().layers):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        modules = tuple(type(m).__name__ for m in layer.modules())
        layers.append(seen.setdefault((shapes, modules, types[index] if types else None), len(seen)))
    return len(seen), layers


def _shorten(config: Any, chosen: Sequence[int]) -> None:
    """The config of a model that has only the chosen layers."""
    config.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in chosen]


def _layer_calls(base: Any, ids: Tensor) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments, without the hidden states, with which the model calls each layer; the layers do not
    run."""
    calls: list[tuple[tuple, dict[str, Any]]] = []

    def record(hidden_states: Tensor, *arguments: object, **by_name: object) -> Tensor:
        calls.append((arguments, by_name))
        return hidden_states

    for layer in base.layers:
        layer.forward = record
    with torch.no_grad():
        base(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
    for layer in base.layers:
        del layer.forward
    return calls


def _tensors(call: tuple[tuple, dict[str, Any]]) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(call)
    return [value.detach() for value in leaves if isinstance(value, Tensor)]


class _Called(nn.Module):
    """A layer with recorded arguments: (hidden, the tensors among the arguments) -> hidden."""

    def __init__(self, layer: nn.Module, arguments: tuple, by_name: dict[str, Any]) -> None:
        super().__init__()
        self.layer = layer
        leaves, self._structure = torch.utils._pytree.tree_flatten((arguments, by_name))
        self._leaves = [None if isinstance(value, Tensor) else value for value in leaves]
        self._is_tensor = [isinstance(value, Tensor) for value in leaves]

    def forward(self, hidden: Tensor, *tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        leaves = [
            next(rest) if is_tensor else value
            for is_tensor, value in zip(self._is_tensor, self._leaves, strict=True)
        ]
        arguments, by_name = torch.utils._pytree.tree_unflatten(leaves, self._structure)
        result = self.layer(hidden, *arguments, **by_name)
        return result[0] if isinstance(result, tuple) else result


class _Head(nn.Module):
    """(hidden[B, S, D], labels[B, S]) -> loss: the last norm, the logits, cross entropy in float32."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(hidden)).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), labels.flatten())


def captured_part(name: str, module: nn.Module, inputs: Sequence[Tensor]) -> Part:
    """Forward and backward of a module as a part; its first input is the activation that it takes.

    Args: inputs: fake tensors, those that need gradients with `requires_grad`.
    """
    captured = capture(module, tuple(inputs))
    program = program_from_fx(captured.joint, name)
    placeholders = [node for node in captured.joint.graph.nodes if node.op == "placeholder"]
    values, names = output_node(captured.joint).args[0], captured.parameter_of_gradient()
    gradients, returns = {}, ""
    for i, value in enumerate(values):
        if i in names and value is not None:
            gradients[names[i]] = tensor_names(value)[0]
        elif i >= captured.forward_outputs and value is not None:
            returns = tensor_names(value)[0]
    of_experts = set(expert_parameters(module))
    experts = {name for name, parameter in module.named_parameters() if parameter in of_experts}
    parameters, takes, gets = {}, "", ""
    for node in placeholders:
        own = state_name(node)
        if is_tangent(node):
            gets = node.name
        elif own is not None and node.name in program.parameters:
            numbers = int(node.meta["val"].numel())
            parameters[node.name] = Parameter(numbers, own in experts, gradients.get(own, ""))
        elif input_position(node) == 0:
            takes = node.name
    gives = tensor_names(values[0])[0]
    return Part(name, with_attention_flops(program), takes, gives, gets, returns, parameters)


def with_attention_flops(program: Program) -> Program:
    """The Program with the FLOPs of its attention instructions."""
    tensors = dict(program.tensors)
    return replace(
        program,
        instructions=tuple(
            replace(i, flops=attention.attention_flops(i, tensors))
            if i.op in (attention.OP, attention.OP_BACKWARD)
            else i
            for i in program.instructions
        ),
    )
