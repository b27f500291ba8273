"""Pure functions from a Program and its costs to a Plan: what moves where, what is cut into how many
parts."""
