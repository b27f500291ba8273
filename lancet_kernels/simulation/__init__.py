"""Training steps of simulated ranks.

Read `simulate` for the models of this library, `own_step` for a step of the user's.
"""
