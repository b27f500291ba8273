"""Passes over the fx graph that apply a plan.

Read `realize` first, which calls the others: `cut` (parts of ranges), `apply` (orders, starts and waits),
`in_place`.
"""
