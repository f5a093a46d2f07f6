"""Every input format stores the same documents, and counts what it cannot store."""

import gzip
import os
import shutil
from pathlib import Path

import pytest

from tests.data.shapes.shape import jsonl, stored
from titan_loop.data.prepare.documents import find_documents
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.errors import UserError

TEXTS = [f"document number {n}: naïve 漢字 🙂\n" for n in range(7)]


def test_which_files(tmp_path):
    for name in ("x/a.jsonl", "x/b/c.jsonl.gz", "x/readme.md", "z/t"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(b"") if name.endswith("gz") else b"{}")
    found = find_documents(tmp_path / "x").files
    assert found == (
        (str(tmp_path / "x/a.jsonl"), "jsonl"),
        (str(tmp_path / "x/b/c.jsonl.gz"), "jsonl"),
    )
    assert find_documents(tmp_path / "x", tmp_path / "x/a.jsonl").files == found[1:]
    readme = (str(tmp_path / "x/readme.md"), "text")
    assert find_documents(tmp_path / "x", format="text").files[-1] == readme
    both = find_documents([tmp_path / "x", tmp_path / "z"]).files
    assert both == (*found, (str(tmp_path / "z/t"), "text"))
    (tmp_path / "empty").mkdir()
    for arguments, options, message in [
        ([tmp_path / "missing"], {}, r"missing does not exist.*hf download"),
        ([tmp_path / "empty"], {}, "empty has no document file"),
        ([tmp_path / "x"], {"pattern": ["*.c"]}, r"has no document file that matches \*\.c"),
        ([tmp_path / "x"], {"format": "parquet"}, "has no parquet file: choose by name"),
        ([tmp_path / "x", tmp_path / "x/a.jsonl"], {}, r"a\.jsonl is given twice"),
        ([tmp_path / "x"], {"format": "jsonlines"}, "format=jsonlines is unknown; nearest: jsonl"),
        (["s3://bucket/x"], {}, r"input s3://bucket/x is in an object store"),
        ([], {}, "no input"),
    ]:
        with pytest.raises(UserError, match=message):
            find_documents(arguments, **options)
    with pytest.raises(UserError, match=r"is given twice: .* both trained on and held out"):
        find_documents(tmp_path / "x/a.jsonl", tmp_path / "x/a.jsonl")


@pytest.mark.parametrize(
    ("name", "held_out"),
    [("holdout", 1), ("hold-out", 1), ("evaluation-00000-of-00001", 0), ("devtest", 0)],
)
def test_nothing_held_out_is_trained_on(tmp_path, name, held_out):
    for each in ("train", name):
        (tmp_path / f"{each}.jsonl").write_text('{"text": "a"}\n')
    documents = find_documents(tmp_path)
    assert [Path(path).stem for path, _ in documents.files] == ["train"]
    assert [Path(path).stem for path, _ in documents.held_out_files] == [name] * held_out


@pytest.mark.parametrize("name", ["readme.jsonl", "license-texts.jsonl.gz", "authors.csv"])
def test_records_are_records_whatever_they_are_about(tmp_path, name):
    (tmp_path / name).write_text("text\nhello\n" if name.endswith("csv") else "")
    (tmp_path / "license.json").write_text('{"name": "MIT"}')
    kind = "csv" if name.endswith("csv") else "jsonl"
    assert find_documents(tmp_path).files == ((str(tmp_path / name), kind),)


@pytest.mark.parametrize("pattern", ["src/**/*.py", "src/**", "/src/**/*", "src/**/*.p**"])
def test_two_stars_stand_for_any_number_of_folders(tmp_path, pattern):
    names = ["src/a.py", "src/x/b.py", "src/x/y/c.py"]
    for name in [*names, "docs/e.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("print(1)\n")
    found = find_documents(tmp_path, pattern=(pattern,)).files
    assert [path for path, _ in found] == [str(tmp_path / name) for name in names]


def test_links(tmp_path, caplog):
    """A download cache links names to files without one; links to folders are counted."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f").write_bytes(gzip.compress(jsonl(TEXTS)))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "a.jsonl.gz").symlink_to("../blobs/0f")
    (snapshot / "more").symlink_to("../blobs")
    (snapshot / "gone.jsonl").symlink_to("nowhere")
    found = find_documents(snapshot)
    assert found.files == ((str(snapshot / "a.jsonl.gz"), "jsonl"),)
    assert "left out 2 links to folders or to nothing" in caplog.text
    (snapshot / "b.jsonl.gz").symlink_to("../blobs/0f")
    with pytest.raises(UserError, match="given twice"):
        find_documents(snapshot)
    (snapshot / "c.jsonl.gz").write_bytes(b"")
    for name in "ab":
        (snapshot / f"{name}.jsonl.gz").unlink()
        (snapshot / f"{name}.jsonl.gz").symlink_to("c.jsonl.gz")
    assert find_documents(snapshot).files == ((str(snapshot / "c.jsonl.gz"), "jsonl"),)
    assert "left out 2 links to other files of it" in caplog.text


@pytest.mark.parametrize("name", [b"a\nb.txt", b"a.txt ", b"\xff.txt"])
def test_names_that_a_list_of_files_cannot_hold(tmp_path, name):
    try:
        (tmp_path / os.fsdecode(name)).write_text("text")
    except OSError:
        pytest.skip("the file system does not allow such names")
    with pytest.raises(UserError, match="has a name that a list of files cannot hold"):
        find_documents(tmp_path)


def test_an_output_inside_the_input_is_no_input(small_tokenizer, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.md").write_text("first")
    (folder / "b.md").write_text("second")
    for out in (folder / "prepared", folder):
        for overwrite in (False, True):
            options = {"held_out_fraction": 0, "overwrite": overwrite}
            tokenize_source(folder, output=out, tokenizer=small_tokenizer, **options)
            assert sorted(stored(out)) == ["first", "second"]
        shutil.rmtree(folder / "prepared", ignore_errors=True)
