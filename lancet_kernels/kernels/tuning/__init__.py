"""Which configuration does a layer get, which others are worth timing, and what do kernels compile to?"""
