"""A case of `overlap_cases` on virtual PEs, with all data on the device."""

from __future__ import annotations

import torch

from lancet_kernels.kernels.config import OverlapConfig, default_overlap_config
from tests.lancet_kernels.kernels.overlap_cases import Answer, Case
from tests.lancet_kernels.kernels.overlap_ranks import DENSE, Layer, make_dense, virtual_layers
from tests.lancet_kernels.kernels.virtual_pes import VirtualPes

# Sizes that tensor descriptors take: multiples of 16 bytes.
ALIGNED_DENSE = ((200, 264, 136), (136, 72, 328), (136, 520, 200))  # M, N, K


class VirtualPass:
    """Forward and backward of a case on all its PEs; rows and results are NaN before the first.

    dense: independent GEMMs ride along in both. bodies: of the kernel.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        *,
        dense: bool = False,
        bodies: str = "triton",
        timeout_s: float = 8.0,
    ) -> None:
        self.pes = VirtualPes(case.world, device)
        sizes = case.width, case.hidden, case.activation, case.dtype
        config = default_overlap_config(*sizes, device, pes_here=case.world)
        if bodies == "gluon":
            config = OverlapConfig.for_gpu(case.width, case.hidden, case.dtype, 90, config.programs)
        self.layers = virtual_layers(self.pes.memories, case, config, timeout_s)
        for layer in self.layers:
            if dense:
                layer.dense = make_dense(case.dtype, ALIGNED_DENSE if bodies == "gluon" else DENSE)
            layer.to(device)
        self.exchanges = [way for layer in self.layers for way in (layer.forward, layer.backward)]

    def load(self, case: Case) -> None:
        """The values of another case of these sizes, at the same addresses."""
        for layer in self.layers:
            other = Layer(case, layer.rank, layer.forward, layer.backward)
            for mine, new in zip(layer.tensors(), other.tensors(), strict=True):
                mine.copy_(new)

    def play(self, rank: int) -> Answer:
        """One whole pass of one PE; asks the device for nothing."""
        return self.layers[rank].run()

    def check(self) -> None:
        """Raise CommunicationError if a wait of any PE ran out of time."""
        for layer in self.layers:
            layer.check()
