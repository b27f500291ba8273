"""A package, so that pytest puts the root and not this folder on the path: `transformers` is that library."""
