"""HiDup: the search for a sharding.

Read `sharding_strategy` (what is decided), then `sharding_search`; `shard_graph` applies it.
"""
