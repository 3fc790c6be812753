"""Randomness keyed by names: the same keys give the same draw, in any order, in any process."""

import hashlib
from statistics import NormalDist

import numpy as np


def key(*keys: str | int) -> int:
    """A 64-bit number from the keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in keys)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform(*keys: str | int) -> float:
    """One draw from (0, 1), both ends excluded."""
    return ((key(*keys) >> 12) + 0.5) / 2**52


def normal(*keys: str | int) -> float:
    """One draw from the standard normal distribution."""
    return NormalDist().inv_cdf(uniform(*keys))


def generator(*keys: str | int) -> np.random.Generator:
    """A generator of its own, for what needs many draws."""
    return np.random.Generator(np.random.PCG64(key(*keys)))
