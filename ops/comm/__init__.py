"""Ranks, and what travels between them.

Read `groups` and `waiting` first, then `all_to_all`; `link` paces and records what the collectives send.
"""
