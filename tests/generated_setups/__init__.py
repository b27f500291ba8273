"""Set-ups that users may have, drawn at random: read `describe`, then `modules` and `train`."""
