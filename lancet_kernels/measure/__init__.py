"""Measuring steps on this machine: launching ranks, timing, benches."""
