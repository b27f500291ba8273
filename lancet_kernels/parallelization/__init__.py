"""`parallelize`: a model for one device on many.

Read `parallelize`, `one_device_model` and `parallel_module`; PrimePar's layers are in `parallel_linears`.
"""
