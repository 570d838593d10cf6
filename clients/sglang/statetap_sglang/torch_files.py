"""One tensor as a `.pt` file. The only module here that imports torch, and only when it is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from statetap_sglang.filesystem import open_regular
from statetap_sglang.format import MODEL_DTYPES, DumpFormatError, TensorView

if TYPE_CHECKING:
    import torch


def _dtypes() -> dict[torch.dtype, str]:
    import torch

    return {getattr(torch, name): safetensors_name for name, safetensors_name in MODEL_DTYPES.items()}


def read_tensor(path: Path) -> TensorView:
    """Map the tensor of a `.pt` file: its bytes as they are, read-only.

    Raises:
        FileNotFoundError: there is none.
        DumpFormatError: not one dense contiguous tensor of a hidden state's dtype, or a pickle that asks for anything else.
    """
    import torch

    descriptor, _ = open_regular(path)
    try:
        # By descriptor, so that what was checked is what is loaded.
        tensor = torch.load(f"/proc/self/fd/{descriptor}", weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # torch raises nearly anything at a malformed or malicious file
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise DumpFormatError(path, f"torch.load refused it: {first_line}") from error
    finally:
        os.close(descriptor)
    if not isinstance(tensor, torch.Tensor):
        raise DumpFormatError(path, f"holds a {type(tensor).__name__}, not one tensor")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_quantized:
        raise DumpFormatError(path, "the tensor is not dense and contiguous; save `tensor.contiguous()`")
    dtype = _dtypes().get(tensor.dtype)
    if dtype is None or not tensor.numel():
        raise DumpFormatError(path, f"the tensor is {tensor.dtype} {tuple(tensor.shape)}, no hidden states")
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data.toreadonly()
    return TensorView(dtype, tuple(tensor.shape), data)


def write_tensor(path: Path, tensor: TensorView) -> None:
    """Write what `read_tensor` reads."""
    import torch

    dtypes = {name: dtype for dtype, name in _dtypes().items()}
    # A copy: torch knows no read-only memory.
    array = torch.frombuffer(bytearray(tensor.data.cast("B")), dtype=dtypes[tensor.dtype])
    torch.save(array.reshape(tensor.shape), path)
