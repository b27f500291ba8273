"""The experts of transformers models on the ops of this library: in two ways, by one mechanism.

    experts            the experts module, made expert-parallel
    convert            for groups of this library
    adapters           families whose experts transformers does not describe
    expert_parallel    for transformers' own expert parallelism, `ep_implementation="lancet"`
    checkpoints        under transformers' names
    causal_lm          a training step, for `optimize`

Only `expert_parallel` and `checkpoints` import transformers: experts are known by their attributes.
"""
