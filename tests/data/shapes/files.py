"""Which files of an input are data, how they are read, and which are held out."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.data.shapes.shape import TEXTS, Rows, Shape, jsonl, parquet
from titan_loop.data.prepare.file_kinds import zstd

A, B, C = TEXTS
_LINES = jsonl(TEXTS)
_CSV = 'id,text\n1,"{}"\n2,"{}"\n3,{}\n'.format(*TEXTS)
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 9\n"
_TABLE = parquet({"text": TEXTS, "id": [1, 2, 3]})


def _zip(files: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(_LINES)
        archive.addfile(member, io.BytesIO(_LINES))
    return file.getvalue()


def _saved(splits: Sequence[str] = ()) -> Callable[[Path], None]:
    """Return a function that saves a `datasets` data set, with splits of one text each if asked."""

    def save(folder: Path) -> None:
        import datasets

        made = datasets.DatasetDict()
        for name, text in zip(splits, TEXTS, strict=False):
            made[name] = datasets.Dataset.from_dict({"text": [text]})
        whole = made if splits else datasets.Dataset.from_dict({"text": TEXTS})
        whole.save_to_disk(folder)
        for path in [*folder.rglob("*.arrow")]:
            path.with_name("cache-0f.arrow").write_bytes(path.read_bytes())

    return save


_BESIDE = "beside files called train"
_TESTS = ("test", "valid", "val", "dev", "eval", "testdata")
_SPLIT: dict[str, Any] = {"train": TEXTS[:2], "held_out": TEXTS[2:]}


def _split(train: str, held_out: str, encode: Callable[[Sequence[str]], bytes] = jsonl) -> Shape:
    """Return a row of two files, of which the second is held out."""
    return Shape({train: encode(TEXTS[:2]), held_out: encode(TEXTS[2:])}, **_SPLIT)


def _each(files: Mapping[str, Callable[[str], bytes | str]]) -> Shape:
    """Return a row of files with a document of their own each."""
    texts = {name: f"{name}: naïve, 漢字\n" for name in files}
    contents = {name: encode(texts[name]) for name, encode in files.items()}
    return Shape(contents, train=tuple(texts.values()))


def _line(text: str) -> bytes:
    return jsonl([text])


def _array(text: str) -> str:
    return json.dumps([{"text": text, "id": 1}])


def _csv(text: str) -> str:
    return f'id,text\n1,"{text}"\n'


def _parquet(text: str) -> bytes:
    return parquet({"text": [text], "id": [1]})


def _twice(compress: Callable[[bytes], bytes]) -> Callable[[str], bytes]:
    """Return what writes two members or frames, of which the first is an empty line."""
    return lambda text: compress(b"\n") + compress(_line(text))


ROWS: Rows = {
    # Formats of files
    "JSON lines": _each(
        {
            **dict.fromkeys(("a.jsonl", "a.ndjson", "A.JSONL", "a.json"), _line),
            **dict.fromkeys(("part-00000", "a.jsonl.txt"), _line),
            "bom.jsonl": lambda text: b"\xef\xbb\xbf" + _line(text),
            "crlf.jsonl": lambda text: b"\r\n" + _line(text).replace(b"\n", b"\r\n\r\n").rstrip(),
        }
    ),
    "compressed": _each(
        {
            "a.jsonl.gz": _twice(gzip.compress),
            "a.jsonl.zst": _twice(zstd.compress),
            "a.jsonl.bz2": _twice(bz2.compress),
            "a.jsonl.xz": _twice(lzma.compress),
            "a.zip": lambda text: _zip({"b.jsonl": _line(text)}),
            "a.json.gz": lambda text: gzip.compress(_array(text).encode()),
            "a.csv.gz": lambda text: gzip.compress(_csv(text).encode()),
        }
    ),
    "JSON values": _each(
        {
            "array.json": _array,
            "indented.json": lambda text: json.dumps([{"text": text}], indent=1),
            "object.json": lambda text: json.dumps({"text": text, "id": 1}, indent=1),
        }
    ),
    "JSON objects": Shape(
        {"a.json": "\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS)}
    ),
    "Parquet": _each(dict.fromkeys(("a.parquet", "a.pq", "a.parq", "part-0"), _parquet)),
    "tables of text": _each(
        {
            "a.csv": _csv,
            "bom.csv": lambda text: "\ufeff" + _csv(text),
            "semicolons.csv": lambda text: f'id;text\n1;"{text}"\n',
            "a.tsv": lambda text: f'id\ttext\n1\t"{text}"\n',
        }
    ),
    "datasets folder": Shape(_saved()),
    "datasets dictionary": Shape(
        _saved(["train", "validation", "test"]),
        train=(A,),
        held_out=(B,),
        warned=("left out 1 file (test/data-00000-of-00001.arrow) beside files called train",),
    ),
    "not JSON": Shape(
        {"a.json": '[{"text": "a"},\n {"text": }]'},
        refused=r"a\.json cannot be read \(not JSON: Expecting value, line 2\): correct it",
    ),
    "zip of several": Shape(
        {"archive.zip": _zip({"a.jsonl": _LINES, "b.jsonl": _LINES})},
        inputs=("archive.zip",),
        refused=r"archive\.zip is neither text nor in a format .*: unpack or rename it",
    ),
    "tar": Shape(
        {"archive.tar.gz": _tar()},
        inputs=("archive.tar.gz",),
        refused=r"archive\.tar\.gz is neither text nor in a format .*: unpack or rename it",
    ),
    "cut-off gz": Shape(
        {"a.jsonl.gz": gzip.compress(_LINES)[:-9]},
        refused=r"a\.jsonl\.gz cannot be read to its end",
    ),
    "cut-off parquet": Shape(
        {"a.parquet": _TABLE[:-9]}, refused=r"a\.parquet cannot be read to its end"
    ),
    "csv.txt": Shape(
        {"a.csv.txt": _CSV},
        inputs=("a.csv.txt",),
        refused=r"a\.csv\.txt is neither text nor .* or rename it, or give --format",
    ),
    "csv as text": Shape({"a.csv": _CSV}, options={"format": "text"}, train=(_CSV,)),
    "csv columns": Shape(
        {"a.csv": _CSV.encode() + b"4,\xffmore,columns\n5\n"}, dropped={"malformed": 2}
    ),
    "csv quotes": Shape(
        {
            "a.csv": _CSV + '4,"lost\n5,lost\n',
            "b.tsv": 'text\tid\n"lost" she said\t1\n5" wide\t2\n',
        },
        train=(*TEXTS, '5" wide'),
        dropped={"malformed": 2},
    ),
    "two columns text": Shape(
        {"a.csv": "text,text\none,two\n"}, refused="several columns are called 'text'"
    ),
    "csv not UTF-8": Shape(
        {"a.csv": _CSV.encode() + b"4,\xff\n\xff,five\n"},
        train=(*TEXTS, "five"),
        dropped={"malformed": 1},
    ),
    "empty files": Shape({"a.csv": _CSV, "b.csv": "", "c.jsonl": ""}),
    "txt": Shape({"a.txt": "\ufeff" + A}, train=(A,)),
    "Latin-1": Shape(
        {"a.txt": "naïve".encode("latin-1"), "b.txt": B},
        refused=r"1 of 2 records .*a\.txt, document 1: invalid UTF-8",
    ),
    # Folders
    "Spark": Shape(
        {
            "part-00000-6f1c.c000.json": jsonl(TEXTS[:2]),
            "part-00001-6f1c.c000.json": jsonl(TEXTS[2:]),
            "_SUCCESS": "",
            "part-00000-6f1c.c000.json.crc": b"crc\0\1",
        }
    ),
    "README and records": Shape({"README.md": "# Data", "LICENSE": "CC0", "data.json": _LINES}),
    "table formats' own files": Shape(
        {
            "a.parquet": _TABLE,
            "_metadata": _TABLE,
            "_delta_log/0.json": '{"commitInfo": {}}',
            "dataset_info.json": "{}",
            "SHA256SUMS": "0f",
        }
    ),
    "mixed records": Shape(
        {
            "a.jsonl.bz2": bz2.compress(jsonl([A])),
            "b/c.parquet": parquet({"text": [B]}),
            "d.csv": f'text\n"{C}"\n',
        }
    ),
    "records and a text": Shape(
        {"a.jsonl": _LINES, "notes.txt": "my notes"}, warned=("left out 1 .txt beside 1 .jsonl",)
    ),
    "code and records": Shape(
        {"data.jsonl": _LINES, "a.py": A, "b.py": B, "src/c.c": C},
        refused=r"holds 1 \.jsonl among 2 \.py, 1 \.c: choose with --pattern, "
        r"e\.g\. '\*\.jsonl' or '\*\.py', or give --format text",
    ),
    "all as text": Shape(
        {"data.jsonl": _LINES, "a.py": A}, options={"format": "text"}, train=(_LINES.decode(), A)
    ),
    "code and README": Shape({"a.py": A, "README.md": B, "LICENSE": C}),
    "bytes of 0": Shape(
        {"a.py": A, "b.py": B, "c.py": C, "d.png": b"\x89PNG\0", "e.txt": "x".encode("utf-16")},
        warned=("left out 1 .png, 1 .txt, which cannot be read as text",),
    ),
    "records and binaries": Shape(
        {"a.jsonl": _LINES, "b.npy": b"\x93NUMPY\0", "c.7z": b"7z\0", "d.jsonl.part": _LINES},
        warned=("left out 1 .npy, 1 .7z, 1 .part, which cannot be read as text",),
    ),
    "notebooks and WARC": Shape(
        {
            **{f"{number}.txt": text for number, text in enumerate(TEXTS)},
            "a.warc.wet.gz": gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n"),
            "b.png": _POINTER,
            "c.ipynb": json.dumps({"cells": []}, indent=1),
        },
        warned=("left out 1 .wet.gz, 1 .png, 1 .ipynb, which cannot be read as text",),
    ),
    "LFS pointer": Shape(
        {"a.parquet": _TABLE, "b.jsonl.gz": _POINTER},
        refused="b.jsonl.gz is only Git LFS's pointer to a file: run git lfs pull",
    ),
    "hidden": Shape(
        {"a.jsonl": _LINES, ".cache/b.jsonl": _LINES}, warned=("left out 1 hidden files",)
    ),
    # Held-out files
    "train, held_out": _split("train.jsonl", "held_out.jsonl"),
    "train, validation": _split(
        "train.parquet", "validation.parquet", lambda texts: parquet({"text": texts})
    ),
    "shards": Shape(
        {
            "train-00000.jsonl": jsonl([A]),
            "train-00001.jsonl": jsonl([B]),
            "held_out-00000.jsonl": jsonl([C]),
        },
        **_SPLIT,
    ),
    "the hub's splits": Shape(
        {
            f"data/{name}-00000-of-00001.parquet": parquet({"text": [text]})
            for name, text in zip(("train", "validation", "test"), TEXTS, strict=True)
        },
        train=(A,),
        held_out=(B,),
        warned=(f"left out 1 file (data/test-00000-of-00001.parquet) {_BESIDE}",),
    ),
    "test, valid, val, dev, eval": Shape(
        {"train.jsonl": _LINES, **{f"{name}.jsonl": jsonl([name]) for name in _TESTS}},
        warned=(f"left out 6 files (dev.jsonl, eval.jsonl, test.jsonl, …) {_BESIDE}",),
    ),
    "latest, contest": Shape(
        {"train2.jsonl": jsonl([A]), "latest.jsonl": jsonl([B]), "contest/a.jsonl": jsonl([C])}
    ),
    "test without train": Shape(
        {"a.jsonl": jsonl([A]), "test.jsonl": jsonl(TEXTS[1:])},
        warned=("1 file (test.jsonl) will be trained on; if they are tests, leave them out",),
    ),
    "test given by name": Shape(
        {"train.jsonl": jsonl([A]), "test.jsonl": jsonl(TEXTS[1:])},
        inputs=("train.jsonl", "test.jsonl"),
        warned=("1 file (test.jsonl) will be trained on; if they are tests, leave them out",),
    ),
    "held-out inputs": Shape(
        {"train.jsonl": jsonl([A]), "held_out.jsonl": jsonl([B]), "dev.jsonl": jsonl([C])},
        options={"held_out_inputs": ("dev.jsonl",)},
        train=(A,),
        held_out=(C,),
        warned=(f"left out 1 file (held_out.jsonl) {_BESIDE}",),
    ),
    "texts' splits": Shape(
        {"wiki.train.txt": A, "wiki.validation.txt": B, "wiki.test.txt": C},
        train=(A,),
        held_out=(B,),
        warned=(f"left out 1 file (wiki.test.txt) {_BESIDE}",),
    ),
    "folders of texts": Shape(
        {"train/pos/0.txt": A, "train/neg/1.txt": B, "test/pos/2.txt": C, "vocabulary.md": C},
        warned=(f"left out 1 file (test/pos/2.txt) {_BESIDE}",),
    ),
    "shared texts": Shape(
        {"train.jsonl": jsonl([A, A, B]), "held_out.jsonl": jsonl([C, B, B])},
        train=(A, A, B),
        held_out=(B, B, C),
        warned=("1 of 2 different held-out texts are trained on, too",),
    ),
    "test_model.py": Shape(
        {"train.py": A, "test_model.py": B, "model.py": C},
        warned=("1 file (test_model.py) will be trained on",),
    ),
}
