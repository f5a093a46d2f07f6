"""Names of files that others wrote stay in their folder, or are refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.errors import UserError
from titan_loop.storage.file_names import is_file_name, path_below

REFUSED = (
    *("", ".", "..", "/", "a/", "/etc/passwd", "../a", "a\0b", "a\nb", "\x1b[31m", "\ud800"),
    *("a\\b", "C:", "C:a", "é" * 128, "a" * 256),
)


@pytest.mark.parametrize("name", [*REFUSED, None, 5, b"a", ["a"]])
def test_what_is_no_name_of_a_file_is_refused(name):
    assert not is_file_name(name)


@pytest.mark.parametrize("name", ["a", "source.json", "00000_doc_shuffled.ds", ".metadata", "é x"])
def test_names_of_files_are_taken(name, tmp_path):
    assert is_file_name(name)
    assert path_below(tmp_path, f"train/{name}", "a card") == tmp_path / "train" / name


@given(st.lists(st.sampled_from([*REFUSED, "a", "b"]), min_size=1, max_size=4))
def test_no_path_leads_out_of_the_folder(parts):
    folder = Path("/nowhere/folder")
    name = "/".join(parts)
    if set(parts) & set(REFUSED):
        with pytest.raises(UserError, match=r"^a listing names the file [^\n]*$"):
            path_below(folder, name, "a listing")
    else:
        assert path_below(folder, name, "a listing").parts[3:] == tuple(parts)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "inside").mkdir()
    (folder / "near").symlink_to("inside")
    (folder / "far").symlink_to(tmp_path)
    assert path_below(folder, "near/a", "a card") == folder / "near" / "a"
    with pytest.raises(UserError, match=r"far/a is a link out of .*folder; delete the link"):
        path_below(folder, "far/a", "a card")
