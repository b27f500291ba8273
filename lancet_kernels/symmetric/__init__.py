"""Symmetric memory: regions that every PE has, and the addresses by which the others reach them."""
