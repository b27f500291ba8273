"""Along which dimensions an op may be cut; the rules of all ops are in `graph.ops`.

Read `derived`, then `rules`; `slices` and `tile_layouts` are PrimePar's view of the same.
"""
