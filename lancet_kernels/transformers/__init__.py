"""The experts of transformers models on the ops of this library, by `convert` or `expert_parallel`.

    experts            the expert-parallel experts module
    convert            for groups of this library; a training step, for `optimize`
    routers            the same choices in checkpointed recomputation, and float32 state
    expert_parallel    for transformers' own expert parallelism, `ep_implementation="lancet"`
    checkpoints        under transformers' names
    count_routing      a callback of transformers' Trainer

Only `expert_parallel` and `count_routing` import transformers; the others recognize experts by attributes.
"""
