"""Pure functions from a Program and its costs to a Plan: what moves where, what is cut into how many
parts."""

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
"""What `strategies` can plan; here so that a command line can list them without importing the solver."""
