"""Compiles the kernels for a GPU without one: for `lancet kernels`, the tuner and the tests."""
