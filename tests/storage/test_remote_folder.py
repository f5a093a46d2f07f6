"""A folder of another file system: names, files, and one line for a wrong address."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from titan_loop.errors import UserError
from titan_loop.storage.remote_folder import RemoteFolder, check_address


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3')}/runs"
        return
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield "memory://bucket/runs" if request.param == "memory" else f"file://{tmp_path}/runs"
    memory.store.clear()


def files(folder: RemoteFolder) -> dict[str, int]:
    """Return the size of every file, by its name from the folder."""
    found = folder._fs.find(folder.path, detail=True)
    return {path.split("/runs/")[-1]: info["size"] for path, info in found.items()}


def test_files_are_written_listed_read_and_deleted(url: str, tmp_path: Path):
    folder = RemoteFolder(f"{url}/", "field")
    assert folder.url == url
    assert folder.names() == folder.names("a") == []
    assert files(folder) == {}
    folder.write("a/b/x", b"four")
    folder.write("a/y", b"")
    assert folder.names() == ["a"]
    assert folder.names("a") == ["b", "y"]
    assert files(folder) == {"a/b/x": 4, "a/y": 0}
    assert folder.read("a/b/x") == b"four"
    with pytest.raises(FileNotFoundError):
        folder.read("a/z")
    folder.download("a/b/x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"four"
    folder.delete("a/b")
    folder.delete("a/nothing")
    assert files(folder) == {"a/y": 0}


def test_exactly_the_keys_below_a_folder_are_deleted(url: str):
    """No name is a pattern, and none is the beginning of another."""
    folder = RemoteFolder(url, "field")
    names = ["exp[1]", "exp1", "exp10", "exp*", "exp?"]
    keys = {f"{name}/step-{step}/x" for name in names for step in (1, 10)}
    for key in keys:
        folder.write(key, b"")
    for name in ("exp[1]/step-1", "exp1/step-1/x", "exp*", "exp?/step-1", "exp", "exp1/step"):
        folder.delete(name)
        keys -= {key for key in keys if f"{key}/".startswith(f"{name}/")}
        assert files(folder).keys() == keys, name
    assert "exp*" not in folder.names()


def test_files_of_another_process_are_seen(url: str):
    one, other = RemoteFolder(url, "field"), RemoteFolder(url, "field")
    assert other.names() == []
    one.write("b", b"")
    assert other.names() == ["b"]
    # Stores of the network would answer from their cache of listings otherwise.
    assert one._fs.storage_options["use_listings_cache"] is False


def test_an_upload_that_does_not_arrive_whole_is_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = RemoteFolder(url, "field")
    (tmp_path / "x").write_bytes(b"four")
    folder.upload(tmp_path / "x", "a/x")
    assert files(folder) == {"a/x": 4}
    monkeypatch.setattr(
        folder._fs, "put_file", lambda local, there: folder._fs.pipe_file(there, b"fou")
    )
    with pytest.raises(OSError, match=r"runs/a/x has 3 bytes instead of 4"):
        folder.upload(tmp_path / "x", "a/x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://b/f", "field=s4://b/f is not a remote folder; nearest: s3, gs; write s3://BUCKET"),
        ("/f", "field=/f is not a remote folder"),
        ("s3://", "field=s3:// is not a remote folder"),
        ("s3://key:secret@b/f", "field holds credentials, which would end up in logs"),
        ("s3://b/exp[1]", r"field=s3://b/exp\[1\] holds \[, which .* for a pattern; choose an add"),
        ("gs://b*/f?", r"holds \* and \?, which"),
        ("s4://key:secret@b/f", "field=… is not a remote folder"),
    ],
)
def test_an_address_that_is_wrong(url: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        check_address(url, "field")
    assert "secret" not in str(caught.value)


def test_what_a_store_answers_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def fail(folder: RemoteFolder, name: str = "") -> list[str]:
        raise TimeoutError("no route\nto the host")

    monkeypatch.setattr(RemoteFolder, "names", fail)
    with pytest.raises(
        UserError, match=r"^field=memory://b cannot .* \(TimeoutError: no route\); "
    ):
        RemoteFolder("memory://b", "field")
