"""MoE blocks of transformers models become `MoELayer`s, and their weights go back under the original names.

    layouts    how a block stores its experts, and how `MoELayer` does
    family     what conversion must know about the MoE block of a model family
    registry   the families
    block      the layer that replaces a block
    convert, export, load, causal_lm    what users call

    expert_parallel    transformers' own expert parallelism with `lancet`'s experts

Conversion never imports transformers: families are recognised by class names and attributes.
"""
