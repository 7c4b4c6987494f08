"""Errors of a GPU that is out of memory."""

import torch

# torch has no function for it. That of accelerate knows neither cuBLAS nor the driver.
TEXTS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""What the driver, cuBLAS and cuDNN say of memory that they ask for by themselves, without torch's allocator."""


def is_out_of_memory(error: Exception) -> bool:
    """True if smaller tensors may help."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
