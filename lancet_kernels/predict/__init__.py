"""Training steps that nobody runs: of a model's `config.json`, of this library's models, of the user's.

fake_ranks  one rank of a job whose collectives send nothing
own_step    a step of the user's, `FILE.py:make_step`
simulate    a step of this library's models, or of the user's, with each strategy

A model of transformers, from its `config.json`:

question    what is asked: model, cluster, layout, batch, recomputation
parts       the embedding, one layer of each kind and the head, captured on fake ranks
saved       what the forward keeps for the backward, and what the backward recomputes
fusion      element-wise ops as the fused kernels that compilers make of them
step        the parts repeated to full depth: a chain of microbatches, with sharding and optimizer
orders      what runs beside what: plans of `schedules`, of one microbatch and of pairs, and Megatron's order
answer      times and memory of each strategy
search      the best layouts for a number of GPUs
report      the answer as one HTML page
"""
