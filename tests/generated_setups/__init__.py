"""Set-ups that users may have, drawn at random: read `describe`, then `modules`, `train` and `outcomes`.
`python -m tests.generated_setups` prints what becomes of many, and what was refused."""
