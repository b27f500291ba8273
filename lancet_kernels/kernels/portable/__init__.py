"""The overlap kernel in plain Triton: it says what is right, and runs in the interpreter and on any GPU."""
