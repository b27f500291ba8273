"""Puts, signals, waits; where rows lie on every PE; which task has which number; what a failed wait says."""
