"""Folders and files appear whole, or not at all."""

from pathlib import Path

import pytest

from titan_loop.storage.staged_folder import staged_file, staged_folder


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_may_be_a_link(tmp_path: Path, exists: bool):
    target, link = tmp_path / "disk" / "real", tmp_path / "link"
    target.parent.mkdir()
    if exists:
        target.mkdir()
    link.symlink_to(target)
    with staged_folder(link) as folder:
        assert folder.parent == target.parent  # on the same disk
        (folder / "a").touch()
    assert link.is_symlink()
    assert [path.name for path in target.iterdir()] == ["a"]


def test_a_file_may_be_a_link_to_nothing(tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    with staged_file(link) as file:
        file.write_text("a")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "a"
