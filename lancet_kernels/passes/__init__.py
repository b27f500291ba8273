"""Passes over fx graphs that others traced: GraphTrainer, AutoParallel, inductor."""

from lancet_kernels.passes.overlap import overlap_pass

__all__ = ["overlap_pass"]
