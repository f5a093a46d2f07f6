"""Walks a pickle's program before anything runs it: what it would build is small and shallow.

An unpickler that makes only harmless objects can still be crashed or kept busy by their shape: a
tuple nested a million times overflows the stack when it is hashed, and one that holds the tuple
before it twice, sixty times over, takes 2^60 steps. Every value is therefore counted with all that
it holds, each time that it holds it.

Source: the opcodes' effects on the stack are those in Python's `pickletools`.
"""

import pickletools
from typing import Any

MOST_BYTES = 1 << 30
"""Size of the largest program that is walked; DCP writes about 200 bytes per tensor and rank."""

_MOST_IN_A_KEY = 1000
"""Values in a tuple or a key of a dictionary; DCP's hold a dozen, torch's a few hundred."""

_MOST_PER_BYTE = 10
"""Values in anything, per byte of the program; about one without sharing."""

_ATOMS = {
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
}
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_NEW = {"EMPTY_LIST", "EMPTY_DICT", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BINPERSID"}
_GROWING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}
_PUT = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}
_GET = {"BINGET", "LONG_BINGET"}


class _Value:
    """What stands on the stack: how many values it is, and whether it may still grow."""

    __slots__ = ("grows", "size")

    def __init__(self, size: int, grows: bool) -> None:
        self.size = size
        self.grows = grows


_ATOM, _MARK = _Value(1, grows=False), _Value(0, grows=False)


def check_program(content: bytes) -> None:
    """Raise unless a pickle is of the kind that torch and DCP write.

    Values that a pickle takes from its memo before they are complete are refused: nothing that is
    written here contains itself.

    Raises:
        ValueError: It is too large, uses other operations, or builds something too deep or too
            large.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"{len(content)} bytes are too many")
    try:
        _walk(content)
    except (IndexError, KeyError) as error:
        raise ValueError("it takes what was never put there") from error


def _walk(content: bytes) -> None:
    stack: list[_Value] = []
    memo: dict[int, _Value] = {}
    most = _MOST_PER_BYTE * len(content)
    operations: Any = pickletools.genops(content)
    for opcode, argument, position in operations:
        name = opcode.name
        if name in _ATOMS:
            stack.append(_ATOM)
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _PUT:
            index = len(memo) if argument is None else argument
            if index > position:
                raise ValueError(f"memo {index} at byte {position}")
            memo[index] = stack[-1]
        elif name in _GET:
            value = memo[argument]
            if value.grows:
                raise ValueError("a value holds itself")
            stack.append(value)
        elif name in _TUPLES or name in _NEW or name in _GROWING:
            taken = _take(stack, opcode)
            size = sum(value.size for value in taken)
            if name in _TUPLES:
                _require(1 + size, _MOST_IN_A_KEY)
                stack.append(_Value(1 + size, grows=False))
            elif name in _NEW:
                stack.append(_Value(1 + size, grows=True))
            else:
                if name in ("SETITEM", "SETITEMS"):
                    _require(max((key.size for key in taken[::2]), default=0), _MOST_IN_A_KEY)
                if not stack[-1].grows:
                    raise ValueError("a value is changed after it was used")
                stack[-1].size += size
                _require(stack[-1].size, most)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"{name} in plain records")


def _take(stack: list[_Value], opcode: Any) -> list[_Value]:
    """Remove what an operation uses up; none of it can grow from here on."""
    before = opcode.stack_before
    if pickletools.markobject in before:
        start = len(stack) - 1
        while stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise IndexError
        taken = stack[start + 1 :]
        del stack[start:]
    else:
        count = len(before) - (opcode.name in _GROWING)
        taken = [stack.pop() for _ in range(count)][::-1]
    for value in taken:
        value.grows = False
    return taken


def _require(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"a value of more than {most} values")
