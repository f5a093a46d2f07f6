"""Sources in an object store: copied once, whole, and read like local ones."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.data.load.splits import load
from tests.support.tiny import tiny_source
from titan_loop.data import remote_source
from titan_loop.data.load.mixture import parse_mixture
from titan_loop.data.source_card import CARD_NAME, SourceCard
from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage.json_files import json_sha256

ADDRESS = "memory://bucket/corpora/tiny"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny_source(tmp_path_factory.mktemp("remote"), documents=12)


@pytest.fixture
def memory(source, tmp_path, monkeypatch) -> Iterator[Any]:
    """The source in a store of its own, and an empty cache."""
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]
    file_system.put(str(source), "/bucket/corpora/tiny", recursive=True)
    monkeypatch.setenv(remote_source.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote_source, "_complete", set())
    yield file_system
    file_system.store.clear()


loader = partial(load, local_batch=4, seq_len=32, prefetch=False)


def cached() -> Path:
    return Path(parse_mixture([ADDRESS])[0].path)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_what_is_read_is_what_a_local_source_gives(memory, source, scheme):
    address = ADDRESS if scheme == "memory" else f"file://{source}"
    cached = Path(parse_mixture([address])[0].path)
    assert not cached.exists()
    remote, local = loader([address]), loader([str(source)])
    assert cached.name == address.rpartition("/")[2]
    for _ in range(3):
        ((here, labels),) = remote.read_step(4)
        ((there, expected),) = local.read_step(4)
        assert here["input"].equal(there["input"])
        assert labels.equal(expected)
    for file in (CARD_NAME, *SourceCard.read(source).files()):
        assert (cached / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("name", ["../../../x", "/x", "a/b", "", "..", "a\0"])
@pytest.mark.parametrize("what", ["shard", "split"])
def test_a_card_that_names_a_file_outside_of_its_folder_is_refused(
    memory, source, tmp_path, name, what
):
    card = json.loads((source / CARD_NAME).read_text())
    del card["card_sha256"]
    if what == "shard":
        card["splits"]["train"]["shards"][0]["file"] = name
    else:
        card["splits"][name] = card["splits"]["train"]
    content = json.dumps({**card, "card_sha256": json_sha256(card)})
    memory.pipe_file(f"/bucket/corpora/tiny/{CARD_NAME}", content.encode())
    memory.store[f"/bucket/corpora/tiny/train/{name}"] = next(iter(memory.store.values()))
    local = shutil.copytree(source, tmp_path / "local")
    (local / CARD_NAME).write_text(content)
    for folder in (cached(), local):
        with pytest.raises(UserError, match=r"source.json names the file .* do not use this data"):
            SourceCard.read(folder)
    shutil.rmtree(local)
    assert_nothing_outside(tmp_path, cached())


def assert_nothing_outside(root: Path, folder: Path) -> None:
    """Every file below `root` lies in `folder`, but for the lock beside it."""
    files = {path for path in root.rglob("*") if path.is_file()}
    assert {path for path in files if folder not in path.parents} <= {folder.parent / "lock"}


def test_an_interrupted_copy_is_completed_and_nothing_is_copied_twice(memory, monkeypatch, caplog):
    get, copied, fails = type(memory).get_file, [], True

    def get_file(self, path, local, *arguments, **keywords):
        if fails and ".index" in path:
            raise ConnectionResetError("reset")
        copied.append(path)
        get(self, path, local, *arguments, **keywords)
        if len(copied) == 1:  # the first one arrives short, and is copied again
            Path(local).write_bytes(b"half")

    monkeypatch.setattr(type(memory), "get_file", get_file)
    with pytest.raises(RunFailedError, match="reset; the store did not answer 5 times"):
        SourceCard.read(cached())
    assert not (cached() / CARD_NAME).exists()
    fails = False
    SourceCard.read(cached())
    files = [f"/bucket/corpora/tiny/{name}" for name in SourceCard.read(cached()).files()]
    assert sorted(copied[1:]) == sorted(files)
    monkeypatch.setattr(remote_source, "_complete", set())  # as in another process
    SourceCard.read(cached())
    assert sorted(copied[1:]) == sorted(files)


def test_another_source_at_the_same_address_is_refused(memory, monkeypatch):
    SourceCard.read(cached())
    card = memory.cat_file(f"/bucket/corpora/tiny/{CARD_NAME}")
    memory.pipe_file(f"/bucket/corpora/tiny/{CARD_NAME}", card + b"\n")
    SourceCard.read(cached())  # this process has looked
    monkeypatch.setattr(remote_source, "_complete", set())
    with pytest.raises(UserError, match=r"tiny has changed since it was copied; delete .*/cache/"):
        SourceCard.read(cached())
    memory.rm(f"/bucket/corpora/tiny/{CARD_NAME}")
    with pytest.raises(UserError, match=r"tiny has no source.json: it is not a prepared"):
        SourceCard.read(cached())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_over_the_protocol_of_s3(s3, source, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="titan_loop")
    fsspec.filesystem("s3").put(str(source), f"{s3}/corpora/tiny", recursive=True)
    for key in ("../../../x", "train/../../../../x"):
        fsspec.filesystem("s3").pipe_file(f"{s3}/corpora/tiny/{key}", b"x")
    monkeypatch.setenv(remote_source.CACHE_VARIABLE, str(tmp_path / "cache"))
    remote, local = loader([f"{s3}/corpora/tiny"]), loader([str(source)])
    assert f"of {s3}/corpora/tiny to {tmp_path}" in caplog.text
    assert_nothing_outside(tmp_path, Path(parse_mixture([f"{s3}/corpora/tiny"])[0].path))
    ((here, labels),) = remote.read_step(4)
    ((there, expected),) = local.read_step(4)
    assert here["input"].equal(there["input"])
    assert labels.equal(expected)
    with pytest.raises(UserError, match=r"mixture=s3://nowhere/tiny cannot be reached"):
        loader(["s3://nowhere/tiny"])
    with pytest.raises(UserError, match=r"corpora/none has no source.json"):
        loader([f"{s3}/corpora/none"])
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in caplog.text
