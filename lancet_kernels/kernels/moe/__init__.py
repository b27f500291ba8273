"""Routing, moving rows of tokens to experts and back, and the activation, each as launches of its own."""
