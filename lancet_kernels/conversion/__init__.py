"""MoE blocks of transformers models become `MoELayer`s, and their weights go back under the original names.

    layouts    how a block stores its experts, and how `MoELayer` does
    family     what conversion must know about the MoE block of a model family
    softmax, deepseek, gpt_oss    the families, one class each; `registry` lists them
    block      the layer that replaces a block
    convert, export, load, causal_lm    what users call

transformers itself is never imported: families are recognised by class names and attributes.
"""
