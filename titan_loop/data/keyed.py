"""Randomness that is a function of its arguments: the one way this package draws anything.

A keyed hash replaces random generators wherever a choice must be the same on every rank, in every
process and after every resume: there is no state to save and none to lose.
"""

import hashlib


def keyed_integer(*parts: object) -> int:
    """Return an integer in [0, 2**64) that depends on all `parts` and on nothing else.

    Args:
        *parts: Strings and integers; their `repr` is hashed, so 1 and "1" differ.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def keyed_uniform(*parts: object) -> float:
    """Return a float in [0, 1) that depends on all `parts` and on nothing else."""
    return (keyed_integer(*parts) >> 11) / 2**53
