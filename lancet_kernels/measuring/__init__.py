"""Measuring steps on this machine."""
