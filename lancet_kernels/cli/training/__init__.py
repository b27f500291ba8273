"""`lancet train`, a demonstration: options, data, a step on ranks, checkpoints, the loop."""
