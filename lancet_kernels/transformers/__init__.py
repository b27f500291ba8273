"""The experts of transformers models on the ops of this library: in two ways, by one mechanism.

    experts            the experts module, made expert-parallel
    convert            for groups of this library; a training step, for `optimize`
    routers            what they choose when a checkpointed block runs again, and their float32 state
    expert_parallel    for transformers' own expert parallelism, `ep_implementation="lancet"`
    checkpoints        under transformers' names
    count_routing      a callback of transformers' Trainer

Only `expert_parallel` and `count_routing` need transformers to be imported: experts are known by their
attributes.
"""
