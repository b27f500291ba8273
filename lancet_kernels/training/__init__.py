"""Training: models, data, ranks, gradients, checkpoints, the loop."""
