"""The rule table: along which dimensions each op may be cut.

Read `equations`, then `rules` and `derived`; `slices` and `tile_layouts` are PrimePar's view of the same.
"""
