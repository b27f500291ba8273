"""A model after `fully_shard` as one graph: read what FSDP holds (fsdp), capture a twin of the model that has
whole parameters and no hooks (twin), put gathers and reduce-scatters into its joint graph (gathers)."""
