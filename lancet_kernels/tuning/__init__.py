"""The tuner of the kernels' configurations."""
