"""The training step as plain data.

Read `program` first, then `graph.rules.rules` (how a part or a rank holds a tensor); `graph.from_fx` makes a
Program of an fx graph.
"""
