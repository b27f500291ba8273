"""`parallelize`: a model for one device on many. PrimePar's layers are in `parallel_linears`."""
