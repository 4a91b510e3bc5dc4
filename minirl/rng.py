"""Randomness as an argument: keys are values, and a generator is opened for one draw.

A key is derived from *what* is sampled (run seed, step, prompt id, sample index), never from a
rank, so that results do not depend on how many processes share the work.
"""

import hashlib
from typing import NewType

import torch

Key = NewType("Key", int)
"""A 63-bit seed. Two keys are equal exactly if they were derived along the same path."""


def key_of(seed: int) -> Key:
    """The root key of a run.

    >>> key_of(42) == key_of(42), key_of(42) == key_of(43)
    (True, False)
    """
    return fold_in(Key(seed), "run")


def fold_in(key: Key, *path: int | str) -> Key:
    """A new key for the draw that `path` names; the same on every rank and every machine.

    >>> fold_in(key_of(0), 3, "prompt", 7) == fold_in(key_of(0), 3, "prompt", 7)
    True
    >>> fold_in(key_of(0), 1, 23) == fold_in(key_of(0), 12, 3)
    False
    """
    text = repr((int(key), *path)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return Key(int.from_bytes(digest, "big") >> 1)


def generator(key: Key) -> torch.Generator:
    """A CPU generator seeded by `key`, for one draw."""
    return torch.Generator().manual_seed(key)
