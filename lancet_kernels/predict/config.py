"""A model of transformers from its `config.json`, without weights: its kinds of layers, and fewer of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lancet_kernels.errors import UserError
from lancet_kernels.predict import attention


def load_config(path: str | Path) -> Any:
    """The transformers configuration in a `config.json`, or in a folder with one. Nothing is downloaded.

    Raises: UserError for a missing file, or a model type that this transformers does not know.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UserError(
            "--hf",
            got="no transformers",
            expected="it installed",
            do="pip install 'lancet-kernels[transformers]'",
        ) from error
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        # A quantized checkpoint says nothing about how the model is trained.
        data.pop("quantization_config", None)
        return AutoConfig.for_model(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        # transformers lists all models that it knows.
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(
            "--hf", got=f"{path} ({text})", expected="the config.json of a model of transformers",
            do="give the file of the model's repository",
        ) from error  # fmt: skip


def number_of_experts(config: Any) -> int:
    """Experts in all of an MoE layer; 0: a dense model. Of a multimodal model, those of its text model."""
    config = config.get_text_config()
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 0


def check_experts(experts: int, ranks: int) -> None:
    """Raise UserError unless the ranks can share the experts."""
    if ranks > 1 and (not experts or experts % ranks):
        raise UserError(
            "--experts-over", got=f"{ranks} ranks for {experts or 'no'} experts",
            expected="a divisor of the number of experts", do="choose another number of ranks",
        )  # fmt: skip


def meta_model(config: Any) -> Any:
    """The causal language model of a configuration, on the meta device, in bfloat16. Raises: UserError."""
    from transformers import AutoModelForCausalLM

    attention.register()
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


def shortened(config: Any, layers: int) -> Any:
    """The configuration, changed to that of a model with only the first layers."""
    config.num_hidden_layers = layers
    # Jamba's follow from their number.
    if getattr(config, "layer_types", None) and not isinstance(
        vars(type(config)).get("layer_types"), property
    ):
        config.layer_types = config.layer_types[:layers]
    return config


def kinds_of_layers(model: Any) -> list[int]:
    """The number of the kind of each layer: alike are layers with the same modules, shapes and attention
    window."""
    seen: dict[object, int] = {}
    types = getattr(model.config, "layer_types", None)
    kinds = []
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise UserError(
            "--hf", got=f"{type(model).__name__}, whose decoder has no `layers`",
            expected="a decoder with a list of layers of that name", do="plan your own step with --module",
        )  # fmt: skip
    for index, layer in enumerate(layers):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        modules = tuple(type(m).__name__ for m in layer.modules())
        kinds.append(seen.setdefault((shapes, modules, types[index] if types else None), len(seen)))
    return kinds


@dataclass(frozen=True)
class Depths:
    """How many of a model's layers are captured: the first `fewer`, and the first `more`, between which lie
    whole periods of its kinds of layers; `extra` times as many follow. more == fewer: all of them."""

    fewer: int
    more: int
    extra: float

    def at_full_depth(self, fewer: float, more: float) -> float:
        """A figure of all layers from those of the two depths."""
        return more + self.extra * (more - fewer)


def depths(kinds: list[int]) -> Depths:
    """The depths to capture. Args: kinds: the number of the kind of each layer, in order.

    Example: three dense layers and 58 alike: the first 6 and the first 9, and 52 further ones.
    """
    total = len(kinds)
    for period in range(1, total):
        alike = (p for p in range(total) if kinds[p + period :] == kinds[p : total - period])
        prefix = next(alike, total)
        # At least three layers each: a step overlaps more at its ends, and orders of fewer differ by chance.
        layers = -(-3 // period) * period
        fewer = prefix + (total - prefix) % period + layers
        if fewer + layers < total:
            return Depths(fewer, fewer + layers, (total - fewer - layers) / layers)
    return Depths(total, total, 0.0)
