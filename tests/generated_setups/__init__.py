"""Set-ups that users may have, drawn at random: read `describe`, then `modules` and `train`; `python -m
tests.generated_setups` runs many of them."""
