"""Random numbers that do not depend on how a batch is cut.

Read `splitmix`, then `token_index` and `dropout`.
"""
