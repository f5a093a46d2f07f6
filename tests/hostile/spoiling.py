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
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path, random.Random], None]

MARKER_VARIABLE = "TITAN_LOOP_HOSTILE_MARKER"
"""Names the file that only executed content creates."""


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Spoil:
    def spoil(path: Path, rng: random.Random) -> None:
        content = path.read_bytes() if path.is_file() else b""
        path.write_bytes(change(content, rng))

    return spoil


def _flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 8)) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _spliced(content: bytes, rng: random.Random) -> bytes:
    first, second = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return rng.choice(
        (
            content[second:] + content[:first],
            content[:first] + content[second:],
            content + content[first:second],
            content[:first] + content[first:second] * 2 + content[second:],
        )
    )


def _replaced(path: Path) -> Path:
    """Remove what has the name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _sparse(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.truncate(rng.choice((1 << 36, 1 << 40, 1 << 43)))


def _linked_to(target: str) -> Spoil:
    return lambda path, _: _replaced(path).symlink_to(target.format(name=path.name))


def _moved_behind_a_link(path: Path, _: random.Random) -> None:
    other = path.with_name(f"{path.name}.elsewhere")
    path.rename(other)
    path.symlink_to(other.name)


ANY_FILE: dict[str, Spoil] = {
    "flipped bits": _bytes(_flipped),
    "cut": _bytes(lambda content, rng: content[: rng.randrange(max(len(content), 1))]),
    "last byte gone": _bytes(lambda content, _: content[:-1]),
    "spliced": _bytes(_spliced),
    "empty": _bytes(lambda *_: b""),
    "zeros": _bytes(lambda content, _: bytes(len(content))),
    "noise": _bytes(lambda content, rng: rng.randbytes(min(len(content), 1 << 16))),
    "a byte more": _bytes(lambda content, rng: content + rng.randbytes(1)),
    "missing": lambda path, _: path.unlink(),
    "a FIFO": lambda path, _: os.mkfifo(_replaced(path)),
    "a folder": lambda path, _: _replaced(path).mkdir(),
    "a sparse file": _sparse,
    "a link to itself": _linked_to("{name}"),
    "a link to nothing": _linked_to("nothing"),
    "a link to /dev/zero": _linked_to("/dev/zero"),
    "a link to a folder": _linked_to("/etc"),
    "behind a link": _moved_behind_a_link,
}

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**13, 10**30, 10**400, -(10**18), 0.5, 1e308, -0.0),
    *(
        "",
        "x",
        "0",
        "../../x",
        "/etc/passwd",
        "a\nb",
        "\x1b[31m",
        "<script>",
        "\ud800",
        "x" * 100_000,
    ),
    *([], {}, [[]], [0] * 1000, {"a": {}}, [None], "nan", "٩", "_x", "*", "."),
)


def _nest(depth: int) -> str:
    return "[" * depth + "]" * depth


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    found = [at] if at else []
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in inner:
        found += places(child, (*at, key))
    return found


def change_json(record: Any, rng: random.Random) -> Any:
    """Return a JSON value with one to three of its values replaced, removed or renamed."""
    for _ in range(rng.choice((1, 1, 1, 3))):
        where = places(record)
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
            holder[str(rng.choice(("x", "", "../x", "\ud800")))] = holder.pop(last)
        else:
            holder[last] = rng.choice(_ODD)
    return record


def write_odd_json(path: Path, record: Any) -> None:
    """Write any JSON value, half surrogate pairs among it."""
    path.write_text(json.dumps(record))


def _changed_json(path: Path, rng: random.Random) -> None:
    write_odd_json(path, change_json(json.loads(path.read_text()), rng))


def _changed_line(path: Path, rng: random.Random) -> None:
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(change_json(json.loads(lines[at]), rng))
    path.write_text("\n".join(lines) + "\n")


def _texts(*texts: str | bytes) -> Spoil:
    def spoil(path: Path, rng: random.Random) -> None:
        text = rng.choice(texts)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return spoil


JSON_TEXTS: dict[str, Spoil] = {
    "deeply nested": lambda path, rng: (
        path.write_text('{"a": ' + _nest(rng.choice((90, 101, 990, 100_000, 3_000_000))) + "}")
        and None
    ),
    "huge numbers": _texts(
        '{"format_version": ' + "9" * 5000 + "}", '{"step": 1e999}', '{"a": NaN}'
    ),
    "another value": _texts("5", "[]", '"x"', "null", "{}", "{", "", "[1,", '{"a":1}{"a":2}'),
    "not UTF-8": _texts(
        b'{"a": "\xff"}', b"\xef\xbb\xbf{}", '{"a": "\\ud800"}', "{}".encode("utf-16")
    ),
}
JSON_FILE: dict[str, Spoil] = {**ANY_FILE, **JSON_TEXTS, "another field": _changed_json}
JSON_LINES = {**ANY_FILE, **JSON_TEXTS, "another field": _changed_line}
# The lines of a run's own files may be of any length.
RUN_LINES = {name: spoil for name, spoil in JSON_LINES.items() if name != "a sparse file"}


_CONTENTS = (
    "flipped bits",
    "cut",
    "last byte gone",
    "spliced",
    "empty",
    "zeros",
    "noise",
    "missing",
)


def _with_code(path: Path, rng: random.Random) -> None:
    """Name Python in a task file; it would leave the marker."""
    module = path.with_name("code.py")
    marker = os.environ[MARKER_VARIABLE]
    module.write_text(f"open({marker!r}, 'w')\n\ndef of(*_):\n    return ''\n")
    field = rng.choice(
        ("doc_to_text", "process_docs", "class", "process_results", "custom_dataset")
    )
    lines = [line for line in path.read_text().splitlines() if not line.startswith(field)]
    path.write_text("\n".join([*lines, f"{field}: !function code.of"]) + "\n")


# Task files are trusted (SECURITY.md): they may be wrong, and their code waits for consent.
TASK_FILE: dict[str, Spoil] = {
    **{name: ANY_FILE[name] for name in _CONTENTS},
    "not YAML": _texts("task: [", "\t: x", "a: &a [*a]", "task: own\ntask: own", "--- 5", "[]"),
    "code": _with_code,
}


ITEMS: dict[str, Spoil] = {name: JSON_LINES[name] for name in _CONTENTS} | JSON_TEXTS


def _odd_keys(path: Path, rng: random.Random) -> None:
    """Put objects beside a source in a store; `whole.bucket_recipe` makes the store."""
    parts = ("..", "..", "..", "", ".", "train", "x", "a\nb", "\\x", "C:x", "nul", "x" * 300)
    keys = ["/".join(rng.choices(parts, k=rng.randint(1, 6))) for _ in range(50)]
    (path.parents[1] / "bucket.json").write_text(json.dumps([*keys, "../../../x", "train/x"]))


BUCKET: dict[str, Spoil] = {"odd keys": _odd_keys}


def _odd_names(path: Path, rng: random.Random) -> None:
    """Name files outside of the source in its card."""
    record = json.loads(path.read_text())
    name = rng.choice(("../../../x", "/tmp/x", "..", "", "a/b", "a\0", "train", 5, None, ["x"]))
    split = record["splits"]["train"]
    if rng.random() < 0.3:
        record["splits"][str(name)] = split
    else:
        rng.choice(split["shards"])["file"] = name
    write_odd_json(path, record)


CARD = {
    "odd names": _odd_names,
    **{name: JSON_FILE[name] for name in ("another field", "empty", "not UTF-8")},
}


def _many_files(path: Path, _: random.Random) -> None:
    """Name 20,000 files: looking through all names for each takes minutes."""
    files = {f"tensor{n}": f"{n}.safetensors" for n in range(20_000)}
    for file in files.values():
        (path.parent / file).touch()
    write_odd_json(path, {"weight_map": files})


WEIGHT_INDEX: dict[str, Spoil] = {**JSON_FILE, "20,000 files": _many_files}


class Payload:
    """Creates the marker where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{os.environ[MARKER_VARIABLE]}'",)


def _shared(count: int) -> bytes:
    return b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(count))


OVERWHELMING = ("nested key", "shared key")
"""Pickles that crash or hang torch.load(weights_only=True), too; see SECURITY.md."""


def programs() -> dict[str, bytes]:
    """Return pickles that execute, crash, hang or fill the memory where nobody looks first."""
    marker = os.environ[MARKER_VARIABLE].encode()
    return {
        "payload": pickle.dumps(Payload()),
        "payload, protocol 0": pickle.dumps(Payload(), protocol=0),
        "INST payload": b"(S'touch " + marker + b"'\nios\nsystem\n.",
        "OBJ payload": b"(cos\nsystem\nS'touch " + marker + b"'\no.",
        "eval": b"\x80\x02cbuiltins\neval\nX\x04\x00\x00\x001+1.\x85R.",
        "getattr chain": b"\x80\x02cbuiltins\ngetattr\ncos\n_wrap_close\n"
        b"X\x08\x00\x00\x00__init__\x86R.",
        "BUILD on a class": b"\x80\x02cpathlib\nPosixPath\nN}X\x06\x00\x00\x00exists\x88s\x86b.",
        "nested key": b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.",
        "shared key": b"\x80\x02}N" + _shared(60) + b"Ns.",
        "nested list": b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b".",
        "shared later": b"\x80\x02"
        + b"".join(b"]q" + bytes([n]) for n in range(60))
        + b"".join(b"h%ch%ca" % (n, n - 1) * 2 for n in range(1, 60))
        + b".",
        "far memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "long frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.",
        "long bytes": b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",
        "persistent": b"\x80\x02X\x01\x00\x00\x00xQ.",
        "extension": b"\x80\x02\x82\x01.",
        "a number": b"\x80\x02K\x05.",
        "a marked stack": b"\x80\x02" + b"(" * 1_000_000 + b"N.",
        "huge integer": b"\x80\x02\x8b\x00\x00\x10\x00" + b"\xff" * (1 << 20) + b".",
    }


def _pickled(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice(list(programs().values())))


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
        name = rng.choice(("x", "\x1b[31m", "model." * 10_000, "optimizer.state.x"))
        changes: list[Callable[[], object]] = [
            lambda: entry.update(shape=shape),
            lambda: entry["chunks"][0].__setitem__(rng.randrange(2), shape),
            lambda: entry["chunks"][0].__setitem__(rng.randrange(5), odd),
            lambda: entry.update(dtype=rng.choice(("int8", "complex128", "nn", None))),
            lambda: entry.update(chunks=rng.choice(([], None, [entry], entry["chunks"] * 1000))),
            lambda: entries.update({name: entries.pop(key)}),
            lambda: entries.update({key: odd}),
        ]
        rng.choice(changes)()

    _rewritten(path, change)


METADATA = {**ANY_FILE, "a crafted pickle": _pickled}
TABLE = {**JSON_FILE, "other entries": _changed_table}


def _hidden_entry(path: Path, rng: random.Random) -> None:
    """Put an archive with another pickle where the first chunk of a tensor lies."""
    import torch

    content = bytearray(path.read_bytes())
    program = rng.choice([made for name, made in programs().items() if name not in OVERWHELMING])
    out = io.BytesIO()
    archive = torch._C.PyTorchFileWriter(out)
    archive.write_record("data.pkl", program, len(program))
    archive.write_end_of_file()
    made = out.getvalue()

    def change(entries: dict[str, Any]) -> None:
        entry = rng.choice([entry for entry in entries.values() if "chunks" in entry])
        entry["chunks"][0][3:] = [len(content), len(made)]

    _rewritten(path.with_name("tensors.json"), change)
    path.write_bytes(bytes(content) + made)


SHARD = {**ANY_FILE, "a hidden pickle": _hidden_entry}


def _header(path: Path, rng: random.Random) -> None:
    """Change the JSON header of a safetensors file, or its length."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    act = rng.randrange(4)
    if act == 0:
        length = rng.choice((0, 1, 1 << 63, (1 << 64) - 1, len(content), 100_000_000))
    elif act == 1:
        header = rng.choice((b"{}", b"[]", b'{"a":' + b"[" * 100_000, b"\xff", b" " * 1_000_000))
    elif act == 2:
        record = json.loads(header)
        name = rng.choice([name for name in record if name != "__metadata__"])
        record[name][rng.choice(("shape", "data_offsets", "dtype"))] = rng.choice(
            ([10**13], [-1], [2**63, 2**63], [0, 1 << 62], [5, 3], "F64", "x", None, [], [[]])
        )
        header = json.dumps(record).encode()
    else:
        header = json.dumps(change_json(json.loads(header), rng)).encode()
    if act:
        length = len(header)
    path.write_bytes(struct.pack("<Q", length) + header + data)


SAFETENSORS = {**ANY_FILE, "another header": _header}


def _numbers(dtype: str) -> Spoil:
    def spoil(path: Path, rng: random.Random) -> None:
        size = struct.calcsize(f"<{dtype}")
        content = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 5))):
            at = rng.randrange(max(len(content) // size, 1)) * size
            most = (1 << 8 * size) - 1
            content[at : at + size] = rng.choice((0, 1, most, most // 2)).to_bytes(size, "little")
        path.write_bytes(bytes(content))

    return spoil


INDEX = {**ANY_FILE, "other document ends": _numbers("Q")}
TOKENS = {**ANY_FILE, "other tokens": _numbers("H")}

TEXT_FILE = {
    **ANY_FILE,
    "not text": _texts(b"\xff\xfe", b"\x00" * 100, "x" * 1_000_000, "{{ x }}", "{% for x in y %}"),
}
