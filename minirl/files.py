"""Files from outside, and the disk under our own: every failure says where and what to do.

No message shows a whole value, which may be as long as a data set.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

Json: TypeAlias = Any
"""What JSON may hold; whoever reads it checks its form."""

TOO_MANY_DIGITS = "it holds an integer too long to be one; write it as text, in quotes"
TOO_DEEP = "lists and mappings are nested too deep in it; make them flatter"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What a disk may answer to a write that was in order."""


def shorten(text: str, limit: int = 200) -> str:
    """The text, or its beginning and its length.

    >>> shorten("123456789", limit=3)
    '123... (9 characters)'
    """
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def parse_json(text: str | bytes, where: str) -> Json:
    """What JSON says.

    Raises:
        ValueError: it is not JSON, or more than Python can hold; the message begins with `where`.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{where}: {TOO_MANY_DIGITS}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: {TOO_DEEP}") from error


def read_object(file: Path, where: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: it cannot be read, is not JSON or no object; the message begins with `where`.
    """
    try:
        found = parse_json(file.read_bytes(), where)
    except OSError as error:
        raise ValueError(f"{where} cannot be read ({error.strerror})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds no JSON object but a {type(found).__name__}")
    return cast("dict[str, Any]", found)


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """Names `place` where the disk cannot take what the block writes there.

    Raises:
        ValueError: the disk is full, over its quota, read-only or broken.
    """
    try:
        yield
    except ValueError:
        raise  # an inner block's, which names its place
    except BaseException as error:  # torch's CheckpointException is no Exception
        reasons = [reason for reason in map(os.strerror, DISK) if reason in str(error)]
        if "<class 'OSError'>" in str(error):  # all that Megatron Core says
            reasons.append("an error of the disk, which may be full")
        if not reasons:
            raise
        raise ValueError(
            f"{str(place)!r} cannot be written: {reasons[0]}; make room there, or name another "
            "place"
        ) from error
