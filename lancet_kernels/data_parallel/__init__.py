"""Gradients over ranks: which are summed over which (gradients), DistributedDataParallel and FSDP beside
experts (ddp, fsdp), sums without a plan (summed_gradients), what they must not miss (outside_gradients), and
whether ranks stay alike (replicas)."""
