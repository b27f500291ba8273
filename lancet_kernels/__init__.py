"""Mixture-of-Experts training whose all-to-all hides behind the whole training graph."""
