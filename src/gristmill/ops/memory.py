"""A lack of device memory, told apart from other errors and in words that say who lacked it."""

from __future__ import annotations

import torch

from gristmill.errors import DriverError

# What a lack of memory is raised as: by torch's allocator, or by the driver, which needs some of
# its own to load a kernel or to launch it.
MEMORY_ERRORS = (torch.OutOfMemoryError, DriverError)


def is_lack(error: BaseException) -> bool:
    """Whether one of MEMORY_ERRORS is a lack of memory."""
    return not isinstance(error, DriverError) or error.is_lack_of_memory


def lack(who: str, error: BaseException) -> torch.OutOfMemoryError:
    """The error for a call that lacked memory.

    Of torch's own kind and with torch's own words in it: programs catch the one and search for the
    other when they try again with less.
    """
    said = str(error)
    if isinstance(error, DriverError):
        said = f"CUDA out of memory. {said}"
    return torch.OutOfMemoryError(f"{who}: {said}")


def give_back() -> bool:
    """Hand what torch's allocator keeps unused back to the driver; False where that cannot be."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.empty_cache()
    return True
