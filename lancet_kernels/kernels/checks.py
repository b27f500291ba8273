"""Argument checks of launchers, before a kernel reads a tensor through its pointer."""

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.runtime import check_device


def check_tensor(
    what: str,
    tensor: Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Raise UserError unless the tensor is contiguous, with this shape (None: any size) and one of these
    dtypes.

    Args: device: of the other tensors of the launch; None: any device on which kernels can run.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        raise UserError(
            f"dtype of {what}",
            got=tensor.dtype,
            expected=" or ".join(map(str, dtypes)),
            do="convert it, or use backend='torch'",
        )
    fits = len(shape) == tensor.ndim and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise UserError(
            f"shape of {what}", got=list(tensor.shape), expected=f"[{wanted}]", do="check the sizes"
        )
    if device is None:
        check_device(what, tensor)
    elif tensor.device != device:
        raise UserError(
            f"device of {what}", got=tensor.device, expected=device, do="move all tensors to one device"
        )
    if not tensor.is_contiguous():
        raise UserError(
            f"layout of {what}",
            got=f"strides {tensor.stride()} for shape {list(tensor.shape)}",
            expected="a contiguous tensor",
            do="call .contiguous() on it",
        )
