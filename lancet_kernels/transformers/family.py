"""What conversion must know about the MoE block of a model family: one subclass of `Family` each.

T  tokens      D  model width      E  experts
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from lancet_kernels.ops.moe.gates import Gate
from lancet_kernels.transformers.layouts import Block, Layout, Listed, Stacked


class Unsupported(Exception):
    """This block cannot become an `MoELayer` with the same results; the message says why."""


class Routed(NamedTuple):
    """What a router gave: logits [T, E]; what the block returns in addition to its output (None: nothing);
    experts and weights [T, K], if it has chosen them as the gate would."""

    logits_TE: Tensor
    second: Tensor | None = None
    choices: tuple[Tensor, Tensor] | None = None


class Family:
    """Base: a router `gate`, `experts` with SwiGLU, no shared expert. Subclasses say what differs."""

    name: ClassVar[str]
    blocks: ClassVar[tuple[str, ...]]
    """Class names of the block."""
    activation: ClassVar[str] = "swiglu"
    bias: ClassVar[bool] = False
    """Do the experts have biases?"""

    in_files: ClassVar[Layout] = Listed()
    """How the published checkpoints store the experts."""
    block_in_files: ClassVar[str] = "mlp"
    """What they call the block."""

    def gate(self, block: Block) -> Gate:
        """The routing rule. Raises: Unsupported."""
        raise NotImplementedError

    def top_k(self, block: Block) -> int:
        """Experts per token."""
        return int(setting(block, "top_k"))

    def layout(self, block: Block) -> Layout:
        """How the block stores its experts. Raises: Unsupported."""
        return layout_of(block.experts)

    def check(self, block: Block) -> None:
        """Raises: Unsupported for a setting that changes results and that `MoELayer` does not have."""
        one = block.experts[0] if isinstance(block.experts, nn.ModuleList) else block.experts
        activation = type(getattr(one, "act_fn", None)).__name__
        if activation not in ("SiLU", "SiLUActivation"):
            raise Unsupported(f"its experts have the activation {activation}, not SiLU")

    def route(self, block: Block, x_TD: Tensor) -> Routed:
        """What the block's router gives.

        The block's own router is called, so the hooks with which transformers collects router logits see
        them.
        """
        result = block.gate(x_TD)
        if isinstance(result, tuple):
            logits_TE, *chosen = result
            return Routed(logits_TE, choices=self.choices(*chosen))
        # transformers 4.5x: the router is a Linear module, and the block returns its logits.
        return Routed(result, second=result)

    def choices(self, *chosen: Tensor) -> tuple[Tensor, Tensor] | None:
        """Experts and weights [T, K] among what a router gives beside logits; None: the gate finds them."""
        return None

    def selection_bias(self, block: Block) -> Tensor | None:
        """What is added to the scores to select experts, [E]."""
        return None

    def shared(self, block: Block, x_TD: Tensor) -> Tensor | None:
        """What every token gets in addition, [T, D]."""
        return None


def setting(block: Block, name: str) -> Any:
    """A setting of the router (transformers 5) or of the block (4.5x). Raises: Unsupported without either."""
    for owner in (getattr(block, "gate", None), getattr(block, "router", None), block):
        if hasattr(owner, name):
            return getattr(owner, name)
    raise Unsupported(f"neither its router nor the block has the setting {name}")


def layout_of(experts: Block) -> Layout:
    """The layout, told by the attributes of the module. Raises: Unsupported."""
    if isinstance(experts, nn.ModuleList):
        names = {name for name, _ in experts[0].named_parameters()} if len(experts) else set()
        for layout in (Listed(), Listed("w1", "w3", "w2")):
            if names == {f"{name}.weight" for name in (layout.gate, layout.up, layout.down)}:
                return layout
    else:
        names = {name for name, _ in experts.named_parameters()}
        if names == {"gate_up_proj", "down_proj"}:
            return Stacked()
    raise Unsupported(f"its experts have the parameters {', '.join(sorted(names)) or 'none'}")
