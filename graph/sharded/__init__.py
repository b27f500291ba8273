"""A model after `fully_shard`: what FSDP holds (fsdp), and a twin of the model with whole parameters and no
hooks, which is captured (twin). `schedules.rewrite.gathers` inserts its gathers and reduce-scatters."""
