"""Ranks, and what travels between them.

Read `groups` and `waiting` first, then `all_to_all`; `link` paces and records what the collectives send.
"""

import os

if os.environ.get("LANCET_CHECK") == "1":
    from lancet_kernels.ops.comm.checked import install

    install()
