"""Ways to spoil a file: what disks, people and attackers do to it, and values that no one expects.

Every function changes one path and draws what it needs from `random.Random`, so that a case is its
seed.
"""

import hashlib
import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Spoil = Callable[[Path, random.Random], object]

MARKER_VARIABLE = "TITAN_LOOP_HOSTILE_MARKER"
"""Names the file that only executed content creates."""


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return content with flipped bits, cut, spliced, doubled or with a byte more."""
    first, second = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    flipped = bytearray(content)
    for _ in range(rng.choice((1, 1, 8)) if content else 0):
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return rng.choice(
        (
            *(bytes(flipped), bytes(flipped), content[:first], content[second:]),
            *(content[:first] + content[second:], content[:second] + content[first:]),
            content[:first] + rng.randbytes(1) + content[first:],
        )
    )


def _bytes(*choices: Callable[[bytes, random.Random], bytes] | bytes | str) -> Spoil:
    def spoil(path: Path, rng: random.Random) -> None:
        change = rng.choice(choices)
        made = change(path.read_bytes(), rng) if callable(change) else change
        path.write_bytes(made.encode() if isinstance(made, str) else made)

    return spoil


def _folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _behind_a_link(path: Path, _: random.Random) -> None:
    other = path.rename(path.with_name(f"{path.name}.elsewhere"))
    path.symlink_to(other.name)


def _zeros(content: bytes, _: random.Random) -> bytes:
    return bytes(len(content))


def _noise(content: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(min(len(content), 1 << 16))


ANY_FILE: Mapping[str, Spoil] = {
    "damaged": _bytes(damaged),
    "other bytes": _bytes(b"", _zeros, _noise),
    "missing": lambda path, _: path.unlink(),
    "a folder": _folder,
    "behind a link": _behind_a_link,
}

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**13, 10**400, -(10**18), 0.5, 1e308),
    *("", "x", "0", "../../x", "/etc/passwd", "a\nb", "\x1b[31m", "\ud800", "x" * 100_000),
    *([], {}, [[]], [0] * 1000, {"a": {}}, [None], "nan", "٩", "*", "."),
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    inner = value.items() if isinstance(value, dict) else ()
    for key, child in enumerate(value) if isinstance(value, list) else inner:
        found += _places(child, (*at, key))
    return found


def _changed(record: Any, rng: random.Random) -> Any:
    """Return a JSON value with one to three of its values replaced, removed or renamed."""
    for _ in range(rng.choice((1, 1, 1, 3))):
        where = _places(record)
        if not where:
            return rng.choice(_ODD)
        *parents, last = rng.choice(where)
        holder = record
        for key in parents:
            holder = holder[key]
        act = rng.randrange(8)
        if act == 0:
            del holder[last]
        elif act == 1 and isinstance(holder, dict):
            holder[rng.choice(("x", "", "../x", "\ud800"))] = holder.pop(last)
        else:
            holder[last] = rng.choice(_ODD)
    return record


def _changed_line(path: Path, rng: random.Random) -> None:
    """Change a JSON file, or one of its lines."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(_changed(json.loads(lines[at]), rng))
    path.write_text("\n".join(lines) + "\n")


JSON_FILE: Mapping[str, Spoil] = {
    **ANY_FILE,
    "deeply nested": _bytes("[" * 100_000 + "]" * 100_000),
    "huge numbers": _bytes('{"format_version": ' + "9" * 5000 + "}", '{"step": 1e999}'),
    "another value": _bytes("5", "[]", '"x"', "null", "{}", "{", "[1,", '{"a":1}{"a":2}'),
    "not UTF-8": _bytes(b'{"a": "\xff"}', '{"a": "\\ud800"}', "{}".encode("utf-16")),
    "another field": _changed_line,
}


def _odd_names(path: Path, rng: random.Random) -> None:
    """Name files outside of the source in its card."""
    record = json.loads(path.read_text())
    name = rng.choice(("../../../x", "/tmp/x", "..", "", "a/b", "a\0", "train", 5, None, ["x"]))
    rng.choice(record["splits"]["train"]["shards"])["file"] = name
    path.write_text(json.dumps(record))


class Payload:
    """Creates the marker where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{os.environ[MARKER_VARIABLE]}'",)


def _programs() -> list[bytes]:
    """Return pickles that execute, crash or fill the memory where nobody looks first."""
    marker = os.environ[MARKER_VARIABLE].encode()
    return [
        pickle.dumps(Payload()),
        pickle.dumps(Payload(), protocol=0),
        b"(S'touch " + marker + b"'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch " + marker + b"'\no.",
        b"\x80\x02cbuiltins\neval\nX\x04\x00\x00\x001+1.\x85R.",
        b"\x80\x02cpathlib\nPosixPath\nN}X\x06\x00\x00\x00exists\x88s\x86b.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.",
        b"\x80\x02X\x01\x00\x00\x00xQ.",
        b"\x80\x02K\x05.",
    ]


def _rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the entries of a checkpoint's table, with a hash that fits."""
    entries = json.loads(path.read_text())["entries"]
    change(entries)
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "entries": entries}))


def _changed_table(path: Path, rng: random.Random) -> None:
    shape = rng.choice(([10**13], [-1, 4], [2**40, 2**40], [0], [1] * 70, [7, 7], ["a", 1 << 33]))
    odd = rng.choice((-1, 1 << 62, 1, None, "x", "../x.distcp", "/dev/zero", "", 5, [], {}))

    def change(entries: dict[str, Any]) -> None:
        key = rng.choice([key for key, entry in entries.items() if "chunks" in entry])
        entry = entries[key]
        changes: list[Callable[[], object]] = [
            lambda: entry.update(shape=shape),
            lambda: entry["chunks"][0].__setitem__(rng.randrange(2), shape),
            lambda: entry["chunks"][0].__setitem__(rng.randrange(5), odd),
            lambda: entry.update(dtype=rng.choice(("int8", "complex128", "nn", None))),
            lambda: entry.update(chunks=rng.choice(([], None, [entry], entry["chunks"] * 1000))),
            lambda: entries.update({rng.choice(("x", "\x1b[31m")): entries.pop(key)}),
            lambda: entries.update({key: odd}),
        ]
        rng.choice(changes)()

    _rewritten(path, change)


def _hidden_entry(path: Path, rng: random.Random) -> None:
    """Put an archive with another pickle where the first chunk of a tensor lies."""
    import torch

    content, out, program = path.read_bytes(), io.BytesIO(), rng.choice(_programs())
    archive = torch._C.PyTorchFileWriter(out)
    archive.write_record("data.pkl", program, len(program))
    archive.write_end_of_file()
    made = out.getvalue()

    def change(entries: dict[str, Any]) -> None:
        entry = rng.choice([entry for entry in entries.values() if "chunks" in entry])
        entry["chunks"][0][3:] = [len(content), len(made)]

    _rewritten(path.with_name("tensors.json"), change)
    path.write_bytes(content + made)


def _header(path: Path, rng: random.Random) -> None:
    """Change the JSON header of a safetensors file, or its length."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    if rng.randrange(3) == 0:
        length = rng.choice((0, 1, 1 << 63, (1 << 64) - 1, len(content), 100_000_000))
    else:
        header = json.dumps(_changed(json.loads(header), rng)).encode()
        header = rng.choice((header, header, b"{}", b'{"a":' + b"[" * 100_000, b"\xff"))
        length = len(header)
    path.write_bytes(struct.pack("<Q", length) + header + data)


def _many_files(path: Path, _: random.Random) -> None:
    """Name 20,000 files: looking through all names for each takes minutes."""
    files = {f"tensor{n}": f"{n}.safetensors" for n in range(20_000)}
    for file in files.values():
        (path.parent / file).touch()
    path.write_text(json.dumps({"weight_map": files}))


def _numbers(size: int) -> Spoil:
    def change(content: bytes, rng: random.Random) -> bytes:
        changed, most = bytearray(content), (1 << 8 * size) - 1
        for _ in range(rng.choice((1, 5))):
            at = rng.randrange(max(len(content) // size, 1)) * size
            number = rng.choice((0, 1, most, most // 2))
            changed[at : at + size] = number.to_bytes(size, "little")
        return bytes(changed)

    return _bytes(change)


CARD = {**JSON_FILE, "odd names": _odd_names}
METADATA = {
    **ANY_FILE,
    "a crafted pickle": lambda path, rng: path.write_bytes(rng.choice(_programs())),
}
TABLE = {**JSON_FILE, "other entries": _changed_table}
SHARD = {**ANY_FILE, "a hidden pickle": _hidden_entry}
SAFETENSORS = {**ANY_FILE, "another header": _header}
WEIGHT_INDEX = {**JSON_FILE, "20,000 files": _many_files}
INDEX = {**ANY_FILE, "other document ends": _numbers(8)}
TOKENS = {**ANY_FILE, "other tokens": _numbers(2)}
TEXT_FILE = {**ANY_FILE, "not text": _bytes(b"\xff\xfe", b"\x00" * 100, "{% for x in y %}")}
