"""The training step as plain data.

Read `program` first, then `forms` (how a part or a rank holds a tensor) and `from_fx`, which makes a Program
of an fx graph. The rest are small: phases, JSON, reachability.
"""
