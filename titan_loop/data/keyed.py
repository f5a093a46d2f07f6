"""Randomness that is a function of its arguments: the one way this package draws anything.

A keyed hash replaces random generators wherever a choice must be the same on every rank, in every
process and after every resume: there is no state to save or to lose.
"""

import hashlib
import math

import numpy as np

_ROUNDS = 6
_MULTIPLIER = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(33)


def keyed_integer(*parts: object) -> int:
    """Return an integer in [0, 2**64) that depends only on the `repr` of all `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def keyed_uniform(*parts: object) -> float:
    """Return a float in [0, 1) that depends only on all `parts`."""
    return (keyed_integer(*parts) >> 11) / 2**53


class KeyedPermutation:
    """A bijection of {0, …, n - 1} chosen by a key: a Feistel network with cycle walking.

    The windows of a source are read in this order. Unlike a table it needs O(1) memory and no pass
    at the start.

    x = a m + b with m = ceil(sqrt(n)). Every round maps (a, b) → (b, a + F_k(b) mod m), which is
    invertible for any F. An image outside the domain is mapped again until it falls inside; that is
    rare, as m² exceeds n by at most 2 sqrt(n). `size` is n, from 1 to 2**62.

    Source: Luby and Rackoff 1988 (Feistel networks); Black and Rogaway 2002, "Ciphers with
        arbitrary finite domains", sections 3 (cycle walking) and 4 (addition modulo m).
    """

    def __init__(self, size: int, key: int) -> None:
        assert 1 <= size <= 2**62, size
        self.size = size
        self._side = np.uint64(math.isqrt(size - 1) + 1)
        self._round_keys = [np.uint64(keyed_integer(key, index)) for index in range(_ROUNDS)]

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Return the images of `index` (any shape, integers in [0, n)) as uint64."""
        image = self._network(np.asarray(index, dtype=np.uint64))
        outside = image >= self.size
        while outside.any():
            image[outside] = self._network(image[outside])
            outside = image >= self.size
        return image

    def _network(self, value: np.ndarray) -> np.ndarray:
        left, right = np.divmod(value, self._side)
        for key in self._round_keys:
            mixed = (right ^ key) * _MULTIPLIER  # uint64 arrays wrap around: the product mod 2**64
            mixed = (mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER
            left, right = right, (left + (mixed >> _SHIFT)) % self._side
        return left * self._side + right
