"""Triton kernels and their launchers; nothing here knows of autograd or torch.distributed."""
