"""Which files of an input are data, how they are read, and which are held out."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.data.shapes.shape import TEXTS, Rows, Shape, jsonl, parquet
from titan_loop.data.prepare.compression import zstd

A, B, C = TEXTS
_LINES = jsonl(TEXTS)
_ARRAY = json.dumps([{"text": text} for text in TEXTS])
_CSV = 'id,text\n1,"{}"\n2,"{}"\n3,{}\n'.format(*TEXTS)
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 9\n"
_TABLE = parquet({"text": TEXTS, "id": [1, 2, 3]})


def _zip(names: Sequence[str]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, _LINES)
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
_SPLIT: dict[str, Any] = {"train": TEXTS[:2], "held_out": TEXTS[2:]}


def _split(train: str, held_out: str, encode: Callable[[Sequence[str]], bytes] = jsonl) -> Shape:
    """Return a row of two files, of which the second is held out."""
    return Shape({train: encode(TEXTS[:2]), held_out: encode(TEXTS[2:])}, **_SPLIT)


ROWS: Rows = {
    "Formats of files": {
        "`a.jsonl` → JSON lines: the field `text` of every record is a document": Shape(
            {"a.jsonl": _LINES}
        ),
        "`a.jsonl.gz` of two members → JSON lines": Shape(
            {"a.jsonl.gz": gzip.compress(jsonl([A])) + gzip.compress(jsonl([B, C]))}
        ),
        "`a.jsonl.zst` of two frames → JSON lines": Shape(
            {"a.jsonl.zst": zstd.compress(jsonl([A])) + zstd.compress(jsonl([B, C]))}
        ),
        "`a.jsonl.bz2` → JSON lines": Shape({"a.jsonl.bz2": bz2.compress(_LINES)}),
        "`a.jsonl.xz` → JSON lines": Shape({"a.jsonl.xz": lzma.compress(_LINES)}),
        "`archive.zip` of one JSONL file → JSON lines": Shape({"archive.zip": _zip(["a.jsonl"])}),
        "`a.ndjson` → JSON lines": Shape({"a.ndjson": _LINES}),
        "`A.JSONL` → JSON lines": Shape({"A.JSONL": _LINES}),
        "JSON lines after a byte order mark → read": Shape({"a.jsonl": b"\xef\xbb\xbf" + _LINES}),
        "JSON lines with `\\r\\n`, empty lines and no line break at the end → read": Shape(
            {"a.jsonl": _LINES.replace(b"\n", b"\r\n\r\n").rstrip()}
        ),
        "`a.json` of JSON lines → JSON lines": Shape({"a.json": _LINES}),
        "`a.json` of one array → every element is a record": Shape({"a.json": _ARRAY}),
        "`a.json` of an array over many lines → the same": Shape(
            {"a.json": _ARRAY.replace(", ", ",\n ")}
        ),
        "`a.json.gz` of one array → the same": Shape({"a.json.gz": gzip.compress(_ARRAY.encode())}),
        "`a.json` of indented objects, one after another → every object is a record": Shape(
            {"a.json": "\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS)}
        ),
        "`a.parquet` → the column `text`": Shape({"a.parquet": _TABLE}),
        "`a.pq` → Parquet": Shape({"a.pq": _TABLE}),
        "`a.parq` → Parquet": Shape({"a.parq": _TABLE}),
        "Parquet without a suffix → Parquet, by its first bytes": Shape({"part-0": _TABLE}),
        "`part-00000` of JSON lines → JSON lines, by the first line": Shape({"part-00000": _LINES}),
        "`a.jsonl.txt` → JSON lines, by the first line": Shape({"a.jsonl.txt": _LINES}),
        "`a.csv` → the column `text`; a header is needed": Shape({"a.csv": _CSV}),
        "`a.csv` with a byte order mark → the same": Shape({"a.csv": "\ufeff" + _CSV}),
        "`a.csv` with semicolons → the same": Shape({"a.csv": _CSV.replace(",", ";")}),
        "`a.csv.gz` → the same": Shape({"a.csv.gz": gzip.compress(_CSV.encode())}),
        "`a.tsv` → the same; quotes as in CSV": Shape({"a.tsv": _CSV.replace(",", "\t")}),
        "a folder that `datasets` saved → its Arrow files, without caches": Shape(_saved()),
        (
            "a `DatasetDict` that `datasets` saved → `train` and, held out, `validation`; "
            "`test` is left out with a warning"
        ): Shape(
            _saved(["train", "validation", "test"]),
            train=(A,),
            held_out=(B,),
            warned=("left out 1 file (test/data-00000-of-00001.arrow) beside files called train",),
        ),
        'a file of one JSON object, `{"text": …}` → one document': Shape(
            {"a.json": json.dumps({"text": A, "id": 1}, indent=1)}, train=(A,)
        ),
        "`a.json` that is not JSON → refused with its line": Shape(
            {"a.json": '[{"text": "a"},\n {"text": }]'},
            refused=r"a\.json cannot be read \(not JSON: Expecting value, line 2\): correct it",
        ),
        "`archive.zip` of several files → refused": Shape(
            {"archive.zip": _zip(["a.jsonl", "b.jsonl"])},
            inputs=("archive.zip",),
            refused=r"archive\.zip is neither text nor in a format .*: unpack or rename it",
        ),
        "`archive.tar.gz` → refused": Shape(
            {"archive.tar.gz": _tar()},
            inputs=("archive.tar.gz",),
            refused=r"archive\.tar\.gz is neither text nor in a format .*: unpack or rename it",
        ),
        "a `.gz` that was cut off → refused": Shape(
            {"a.jsonl.gz": gzip.compress(_LINES)[:-9]},
            refused=r"a\.jsonl\.gz cannot be read to its end",
        ),
        "a `.zst` that was cut off → refused": Shape(
            {"a.jsonl.zst": zstd.compress(_LINES)[:-9]},
            refused=r"a\.jsonl\.zst cannot be read to its end",
        ),
        "a `.parquet` that was cut off → refused": Shape(
            {"a.parquet": _TABLE[:-9]}, refused=r"a\.parquet cannot be read to its end"
        ),
        "`a.csv.txt` → refused: rename it, or give `--format csv` or `--format text`": Shape(
            {"a.csv.txt": _CSV},
            inputs=("a.csv.txt",),
            refused=r"a\.csv\.txt is neither text nor .* or rename it, or give --format",
        ),
        "`a.csv.txt` with `--format csv` → CSV": Shape(
            {"a.csv.txt": _CSV}, inputs=("a.csv.txt",), options={"format": "csv"}
        ),
        "`a.csv` with `--format text` → one document, with its commas and quotes": Shape(
            {"a.csv": _CSV}, options={"format": "text"}, train=(_CSV,)
        ),
        (
            "a row of CSV with too few or too many columns → dropped and counted as `malformed`"
        ): Shape({"a.csv": _CSV.encode() + b"4,\xffmore,columns\n5\n"}, dropped={"malformed": 2}),
        (
            "a quote that is not closed, or that closes before its cell ends → the same: "
            "one `malformed` for all rows that it takes"
        ): Shape(
            {
                "a.csv": _CSV + '4,"lost\n5,lost\n',
                "b.tsv": 'text\tid\n"lost" she said\t1\n5" wide\t2\n',
            },
            train=(*TEXTS, '5" wide'),
            dropped={"malformed": 2},
        ),
        "a table with two columns `text` → refused": Shape(
            {"a.csv": "text,text\none,two\n"}, refused="several columns are called 'text'"
        ),
        "a cell of CSV that is not UTF-8 → the same; in another column it costs nothing": Shape(
            {"a.csv": _CSV.encode() + b"4,\xff\n\xff,five\n"},
            train=(*TEXTS, "five"),
            dropped={"malformed": 1},
        ),
        "CSV without a header → refused: the message names the columns that it has": Shape(
            {"a.csv": "one,1\ntwo,2\n"},
            refused="1 of 1 records .* row 1: no field 'text', only 'one', '1'",
        ),
        "an empty `.csv` or `.jsonl` beside others → no documents": Shape(
            {"a.csv": _CSV, "b.csv": "", "c.jsonl": ""}
        ),
        "`a.txt`, or code → one document, a byte order mark removed": Shape(
            {"a.txt": "\ufeff" + A}, train=(A,)
        ),
        "`a.txt.gz` → the same": Shape({"a.txt.gz": gzip.compress(B.encode())}, train=(B,)),
        (
            "text in Latin-1 → dropped and counted as `malformed`; refused above `--max-malformed`"
        ): Shape(
            {"a.txt": "naïve".encode("latin-1"), "b.txt": B},
            refused=r"1 of 2 records .*a\.txt, document 1: invalid UTF-8",
        ),
    },
    "Folders": {
        (
            "Spark's `part-00000-….c000.json`, `_SUCCESS` and `.crc` files → JSON lines; "
            "the others are of the machine"
        ): Shape(
            {
                "part-00000-6f1c.c000.json": jsonl(TEXTS[:2]),
                "part-00001-6f1c.c000.json": jsonl(TEXTS[2:]),
                "_SUCCESS": "",
                "part-00000-6f1c.c000.json.crc": b"crc\0\1",
            }
        ),
        "`README.md`, `LICENSE` and `data.json` → the records; the others describe them": Shape(
            {"README.md": "# Data", "LICENSE": "CC0", "data.json": _LINES}
        ),
        (
            "`a.parquet`, `_metadata`, `_delta_log/0.json`, `dataset_info.json`, "
            "`SHA256SUMS` → the Parquet file"
        ): Shape(
            {
                "a.parquet": _TABLE,
                "_metadata": _TABLE,
                "_delta_log/0.json": '{"commitInfo": {}}',
                "dataset_info.json": "{}",
                "SHA256SUMS": "0f",
            }
        ),
        "`a.jsonl` and `b.jsonl.bz2` → both": Shape(
            {"a.jsonl": jsonl(TEXTS[:1]), "b.jsonl.bz2": bz2.compress(jsonl(TEXTS[1:]))}
        ),
        "JSON lines, Parquet and CSV → all of them, one source": Shape(
            {
                "a.jsonl": jsonl([A]),
                "b/c.parquet": parquet({"text": [B]}),
                "d.csv": f'text\n"{C}"\n',
            }
        ),
        (
            "one file of records and one text → the records; the text is left out with a warning"
        ): Shape(
            {"a.jsonl": _LINES, "notes.txt": "my notes"},
            warned=("left out 1 .txt beside 1 .jsonl",),
        ),
        (
            "a repository of code with one `data.jsonl` → refused: `--pattern` or `--format"
            " text` decides"
        ): Shape(
            {"data.jsonl": _LINES, "a.py": A, "b.py": B, "src/c.c": C},
            refused=r"holds 1 \.jsonl among 2 \.py, 1 \.c: choose with --pattern, "
            r"e\.g\. '\*\.jsonl' or '\*\.py', or give --format text",
        ),
        "the same with `--pattern '*.py' '*.c'` → every matching file is a document": Shape(
            {"data.jsonl": _LINES, "a.py": A, "b.py": B, "src/c.c": C},
            options={"pattern": ("*.py", "*.c")},
        ),
        "the same with `--pattern '*.jsonl'` → JSON lines": Shape(
            {"data.jsonl": _LINES, "a.py": A, "b.py": B, "src/c.c": C},
            options={"pattern": ("*.jsonl",)},
        ),
        "the same with `--format text` → every file is a document, also the JSON": Shape(
            {"data.jsonl": _LINES, "a.py": A},
            options={"format": "text"},
            train=(_LINES.decode(), A),
        ),
        "code with `README.md` and `LICENSE` → every file is a document": Shape(
            {"a.py": A, "README.md": B, "LICENSE": C}
        ),
        (
            "texts and files with bytes of 0 (images, archives, UTF-16) → the texts; the "
            "others are left out with a warning"
        ): Shape(
            {"a.py": A, "b.py": B, "c.py": C, "d.png": b"\x89PNG\0", "e.txt": "x".encode("utf-16")},
            warned=("left out 1 .png, 1 .txt, which cannot be read as text",),
        ),
        (
            "records beside `b.npy`, `c.7z` and `d.jsonl.part` → the records; the others "
            "are left out with a warning"
        ): Shape(
            {"a.jsonl": _LINES, "b.npy": b"\x93NUMPY\0", "c.7z": b"7z\0", "d.jsonl.part": _LINES},
            warned=("left out 1 .npy, 1 .7z, 1 .part, which cannot be read as text",),
        ),
        (
            "texts beside a notebook, WARC files and Git LFS's pointer to an image → the "
            "texts; the others are left out with a warning"
        ): Shape(
            {
                **{f"{number}.txt": text for number, text in enumerate(TEXTS)},
                "a.warc.wet.gz": gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n"),
                "b.png": _POINTER,
                "c.ipynb": json.dumps({"cells": []}, indent=1),
            },
            warned=("left out 1 .wet.gz, 1 .png, 1 .ipynb, which cannot be read as text",),
        ),
        "`a.parquet` beside Git LFS's pointer to `b.jsonl.gz` → refused": Shape(
            {"a.parquet": _TABLE, "b.jsonl.gz": _POINTER},
            refused="b.jsonl.gz is only Git LFS's pointer to a file: run git lfs pull",
        ),
        "hidden files → left out with a warning": Shape(
            {"a.jsonl": _LINES, ".cache/b.jsonl": _LINES}, warned=("left out 1 hidden files",)
        ),
    },
    "Held-out files": {
        "`train.jsonl` and `held_out.jsonl` → the second is held out": _split(
            "train.jsonl", "held_out.jsonl"
        ),
        "`train.jsonl.gz` and `held_out.jsonl.gz` → the second is held out": _split(
            "train.jsonl.gz", "held_out.jsonl.gz", lambda texts: gzip.compress(jsonl(texts))
        ),
        "`train.parquet` and `validation.parquet` → the second is held out": _split(
            "train.parquet", "validation.parquet", lambda texts: parquet({"text": texts})
        ),
        "`train/a.jsonl` and `held-out/a.jsonl` → the second is held out": _split(
            "train/a.jsonl", "held-out/a.jsonl"
        ),
        (
            "`train-00000.jsonl`, `train-00001.jsonl` and `held_out-00000.jsonl` → the last"
            " is held out"
        ): Shape(
            {
                "train-00000.jsonl": jsonl([A]),
                "train-00001.jsonl": jsonl([B]),
                "held_out-00000.jsonl": jsonl([C]),
            },
            **_SPLIT,
        ),
        (
            "the hub's `data/train-00000-of-00001.parquet`, `validation-…` and `test-…` → "
            "`validation` is held out, `test` is left out with a warning"
        ): Shape(
            {
                f"data/{name}-00000-of-00001.parquet": parquet({"text": [text]})
                for name, text in zip(("train", "validation", "test"), TEXTS, strict=True)
            },
            train=(A,),
            held_out=(B,),
            warned=(f"left out 1 file (data/test-00000-of-00001.parquet) {_BESIDE}",),
        ),
        "`train.jsonl`, `train2.jsonl` and `held_out.jsonl` → the last is held out": Shape(
            {"train.jsonl": jsonl([A]), "train2.jsonl": jsonl([B]), "held_out.jsonl": jsonl([C])},
            **_SPLIT,
        ),
        (
            "`train.jsonl` beside `test`, `valid`, `val`, `dev` and `eval` → `train.jsonl`;"
            " the others are left out with a warning"
        ): Shape(
            {
                "train.jsonl": _LINES,
                **{
                    f"{name}.jsonl": jsonl([name])
                    for name in ("test", "valid", "val", "dev", "eval")
                },
            },
            warned=(f"left out 5 files (dev.jsonl, eval.jsonl, test.jsonl, …) {_BESIDE}",),
        ),
        (
            "`train2017`, `val2017`, `test01`, `devset` and `testing` → the first; the "
            "others are left out with a warning"
        ): Shape(
            {f"{name}.jsonl": jsonl([C]) for name in ("val2017", "test01", "devset", "testing")}
            | {"train2017.jsonl": _LINES},
            warned=(f"left out 4 files (devset.jsonl, test01.jsonl, testing.jsonl, …) {_BESIDE}",),
        ),
        "`train.jsonl`, `latest.jsonl` and `contest/a.jsonl` → all are trained on": Shape(
            {"train.jsonl": jsonl([A]), "latest.jsonl": jsonl([B]), "contest/a.jsonl": jsonl([C])}
        ),
        (
            "`a.jsonl` and `test.jsonl`, none called train → all are trained on, with a warning"
        ): Shape(
            {"a.jsonl": jsonl([A]), "test.jsonl": jsonl(TEXTS[1:])},
            warned=("1 file (test.jsonl) will be trained on; if they are tests, leave them out",),
        ),
        (
            "`train.jsonl` and `test.jsonl`, given by name → all are trained on, with a warning"
        ): Shape(
            {"train.jsonl": jsonl([A]), "test.jsonl": jsonl(TEXTS[1:])},
            inputs=("train.jsonl", "test.jsonl"),
            warned=("1 file (test.jsonl) will be trained on; if they are tests, leave them out",),
        ),
        (
            "`train.jsonl`, `held_out.jsonl` and `--held-out-inputs dev.jsonl`, beside them"
            " → `dev.jsonl` is held out, `held_out.jsonl` is left out with a warning"
        ): Shape(
            {"train.jsonl": jsonl([A]), "held_out.jsonl": jsonl([B]), "dev.jsonl": jsonl([C])},
            options={"held_out_inputs": ("dev.jsonl",)},
            train=(A,),
            held_out=(C,),
            warned=(f"left out 1 file (held_out.jsonl) {_BESIDE}",),
        ),
        "`wiki.train.txt`, `wiki.validation.txt` and `wiki.test.txt` → as with records": Shape(
            {"wiki.train.txt": A, "wiki.validation.txt": B, "wiki.test.txt": C},
            train=(A,),
            held_out=(B,),
            warned=(f"left out 1 file (wiki.test.txt) {_BESIDE}",),
        ),
        "folders `train` and `test` of texts → `test` is left out with a warning": Shape(
            {"train/pos/0.txt": A, "train/neg/1.txt": B, "test/pos/2.txt": C, "vocabulary.md": C},
            warned=(f"left out 1 file (test/pos/2.txt) {_BESIDE}",),
        ),
        (
            "`train.jsonl` and `held_out.jsonl` that share documents → stored as they are, "
            "with a warning that counts them"
        ): Shape(
            {"train.jsonl": jsonl([A, A, B]), "held_out.jsonl": jsonl([C, B, B])},
            train=(A, A, B),
            held_out=(B, B, C),
            warned=("1 of 2 different held-out texts are trained on, too",),
        ),
        "code with `train.py` and `test_model.py` → all are trained on, with a warning": Shape(
            {"train.py": A, "test_model.py": B, "model.py": C},
            warned=("1 file (test_model.py) will be trained on",),
        ),
    },
}
