"""Predictions of training steps, without running them.

own_step         a step of the user's, `FILE.py:make_step`, on one of several fake ranks
simulate         a step of this library's models, or of the user's, with each strategy

A model of transformers, from its `config.json`:

question         model, cluster, layout, routing, recomputation
config           the model's kinds of layers, and models with fewer of them
model_step       its step, captured as `optimize` does, or that of a tensor-parallel rank
attention, recurrence    ops that stay one instruction, with their own costs
recomputation    tensors that the forward saves, and ops that the backward runs again
kernels          instructions as the fused kernels that compilers make of them
microbatch       the step at one depth, with costs, sharding and optimizer; pairs of microbatches
answer           times and memory of each strategy at full depth
measured         a measured step beside the predicted one, term by term
search           the best layouts for a number of GPUs
report           the answer as one HTML page
"""
