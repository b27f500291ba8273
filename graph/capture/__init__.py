"""From a module to its joint graph, and back to a function.

Read `capture` first, then `trace` (torch's side of it), `captured_graph` (edits of it, activation
checkpointing) and `run`.
"""
