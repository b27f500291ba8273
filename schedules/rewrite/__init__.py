"""Passes over the fx graph of a training step.

Read `walk` first: the step and the lists of passes, in their order. Each pass calls one of the others:
`gathers` (FSDP), `buckets` (sums of gradients), `cut` (parts of ranges), `apply` (orders, starts and waits,
writes in place), `fused` (fused launches).
"""
