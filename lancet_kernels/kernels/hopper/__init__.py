"""The overlap kernel in Gluon: a TMA producer warp, two warpgroups that multiply, and warps that copy."""
