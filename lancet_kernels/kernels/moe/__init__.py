"""Moving rows of tokens to experts and back, and the activation, each as a launch of its own."""
