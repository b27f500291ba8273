"""HiDup's search for a sharding: `sharding_strategy` says what is decided, `shard_graph` applies it."""
