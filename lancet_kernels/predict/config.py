"""A model of transformers from its `config.json`, without weights: its kinds of layers, and fewer of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from lancet_kernels.errors import UserError
from lancet_kernels.layer.model_layers import moe_layers
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.predict import attention
from lancet_kernels.transformers.convert import convert

LAYERS = ("layers", "blocks")
"""Attribute names of a model's list of layers."""


def load_config(path: str | Path) -> Any:
    """The transformers configuration in a `config.json`, or in a folder with one; of a multimodal model that
    of its text model. Nothing is downloaded.

    Raises: UserError for a missing file, or a model type that this transformers does not know.
    """
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
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
        data, _ = PreTrainedConfig.get_config_dict(file.resolve(strict=True), local_files_only=True)
        # Checkpoints are quantized after training.
        data.pop("quantization_config", None)
        if data.get("model_type") not in CONFIG_MAPPING:
            # A model with remote code may be a class of transformers: Kimi-K2 is a DeepSeek-V3.
            for name in data.get("architectures") or ():
                if own := getattr(transformers, name, None):
                    data["model_type"] = own.config_class.model_type
        if data.get("model_type") not in CONFIG_MAPPING:
            # Shorter than transformers' error, which lists all known types.
            raise ValueError(f"its model_type {data.get('model_type')!r} is none of this transformers")
        whole = AutoConfig.for_model(**data)
        config = whole.get_text_config()
        config.part_of = "" if config is whole else whole.model_type
        return config
    except Exception as error:  # the checks of fields raise what is no ValueError
        text = shorten(str(error), 100, placeholder=" ...") or type(error).__name__
        raise UserError(
            "--hf", got=f"{path} ({text})", expected="the config.json of a model of transformers",
            do="give the file of the model's repository",
        ) from error  # fmt: skip


@lru_cache(maxsize=16)
def layers_and_experts(hf: str) -> tuple[list[int], int]:
    """The kind of each layer of a model, and the number of experts of an MoE layer; 0: a dense model.

    Args: hf: as of `Question`.
    Raises: UserError for a model that is no decoder with a list of layers, and for experts that cannot be
        converted.
    """
    model = meta_model(load_config(hf))
    kinds = kinds_of_layers(model)
    if not kinds:
        raise UserError(
            "--hf", got=f"{model.config.model_type} without layers", expected="at least one",
            do="correct num_hidden_layers",
        )  # fmt: skip
    for why in convert(model, Groups()).left_alone.values():
        raise UserError(
            "--hf", got=f"{model.config.model_type}, which cannot be converted: {why}",
            expected="a family that `convert` takes", do="plan your own step with --module",
        )  # fmt: skip
    return kinds, next((layer.num_experts for layer in moe_layers(model)), 0)


def check_experts(experts: int, ranks: int) -> None:
    """Raise UserError unless the ranks can share the experts."""
    if ranks > 1 and (not experts or experts % ranks):
        raise UserError(
            "--experts-over", got=f"{ranks} ranks for {experts or 'no'} experts",
            expected="a divisor of the number of experts", do="choose another number of ranks",
        )  # fmt: skip


def _with_head(model: Any) -> Any:
    """The text model of a multimodal one, which transformers has without a head, with a linear head."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class TextModelWithHead(type(model).__base__):  # type: ignore[misc]
        __module__ = type(model).__module__  # in which transformers looks for the supported attention kernels
        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__(model.config)
            self.model = model
            width = model.get_input_embeddings().embedding_dim
            self.lm_head = nn.Linear(width, model.config.vocab_size, bias=False, dtype=model.dtype)

        def forward(self, **inputs: Any) -> Any:
            return CausalLMOutputWithPast(logits=self.lm_head(self.model(**inputs).last_hidden_state))

    return TextModelWithHead()


def meta_model(config: Any) -> Any:
    """The causal language model of a configuration, on the meta device, in bfloat16. Raises: UserError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    attention.register()
    config._attn_implementation = attention.IMPLEMENTATION
    config.use_cache = False
    # Frequencies that depend on the length of a batch cannot be traced, and cost no more than others.
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") in ("dynamic", "longrope"):
            parameters["rope_type"] = "default"
    kind = type(config)
    with_head = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    own: Any = with_head or MODEL_MAPPING.get(kind, None)
    if own is None:  # the text models of some multimodal ones have no auto class
        code = import_module(kind.__module__.replace(".configuration_", ".modeling_"))
        own = getattr(code, kind.__name__.replace("Config", "Model"), None)
    if own is None:
        raise UserError(
            "--hf", got=f"model type {config.model_type}", expected="a causal language model",
            do="give the config of one",
        )  # fmt: skip
    kernel = attention.IMPLEMENTATION
    try:
        with torch.device("meta"):
            model = own._from_config(config, dtype=torch.bfloat16, attn_implementation=kernel)
            return model if with_head else _with_head(model)
    except ImportError:
        raise
    except Exception as error:  # anything that an invalid value causes in the model's code
        why = shorten(f"{type(error).__name__}: {error}", 100, placeholder=" ...")
        raise UserError(
            "--hf", got=f"{config.model_type} that cannot be built ({why})",
            expected="values that make a model", do="correct its config.json",
        ) from error  # fmt: skip


def shortened(config: Any, layers: int) -> Any:
    """Change a configuration to that of a model with only the first layers, and return it."""
    config.num_hidden_layers = layers
    # Jamba computes its types from the number of layers.
    if getattr(config, "layer_types", None) and not isinstance(
        vars(type(config)).get("layer_types"), property
    ):
        config.layer_types = config.layer_types[:layers]
    return config


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of layers of a model's decoder. Raises: UserError for other models."""
    for name, module in model.get_decoder().named_modules():
        if name.rpartition(".")[2] in LAYERS and isinstance(module, nn.ModuleList):
            return module
    raise UserError(
        "--hf", got=f"{model.config.model_type}, whose decoder has no `{'` or `'.join(LAYERS)}`",
        expected="a decoder with a list of layers of that name", do="plan your own step with --module",
    )  # fmt: skip


def kinds_of_layers(model: Any) -> list[int]:
    """A number for the kind of each layer. Of one kind are layers with the same modules, shapes and type of
    attention."""
    numbers: dict[object, int] = {}
    types = getattr(model.config, "layer_types", None)
    kinds = []
    for index, layer in enumerate(decoder_layers(model)):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        modules = tuple(type(m).__name__ for m in layer.modules())
        kinds.append(numbers.setdefault((shapes, modules, types[index] if types else None), len(numbers)))
    return kinds


@dataclass(frozen=True)
class Depths:
    """The captured numbers of layers, `fewer` and `more`. They differ by whole periods of the kinds of
    layers, and `extra` times that difference follows. more == fewer: all layers are captured."""

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
        # At least three layers: with fewer, effects at the ends of a step dominate.
        layers = -(-3 // period) * period
        fewer = prefix + (total - prefix) % period + layers
        if fewer + layers < total:
            return Depths(fewer, fewer + layers, (total - fewer - layers) / layers)
    return Depths(total, total, 0.0)
