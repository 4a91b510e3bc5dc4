"""A disk that has no room."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file that this process writes in the block grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
