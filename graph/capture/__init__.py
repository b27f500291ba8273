"""From a module to its joint graph, and back to a function.

Read `capture` first, then `trace` (torch's side of it), `recompute` (activation checkpointing) and `run`.
"""
