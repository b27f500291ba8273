"""Planning: pure functions from a Program and its costs to a Plan, which says how instructions are ordered
and partitioned."""

STRATEGY_NAMES = (
    "none",
    "tutel",
    "lancet-dw",
    "lancet-partition",
    "lancet",
    "duplex",
    "lancet+duplex",
    "auto",
)
"""The strategies of `schedules.strategies`; here so that a command line can list them without that import."""
MICROBATCHES = "microbatches"
"""A further one for several microbatches, which run in pairs (`cut.duplex`)."""
