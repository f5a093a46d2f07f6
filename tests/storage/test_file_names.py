"""Names of files that others wrote stay in their folder, or are refused."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_loop.errors import UserError
from titan_loop.storage.file_names import is_file_name, path_below

REFUSED = (
    *("", ".", "..", "/", "a/", "/etc/passwd", "../a", "a\0b", "a\nb", "\x1b[31m", "\ud800"),
    *("a\\b", "C:", "C:a", "é" * 128, "a" * 256),
)
NAMES = ("a", "source.json", "00000_doc_shuffled.ds", ".metadata", "é x")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([*REFUSED, *NAMES]), min_size=1, max_size=4))
def test_no_path_leads_out_of_the_folder(tmp_path, parts):
    name = "/".join(parts)
    if set(parts) & set(REFUSED):
        with pytest.raises(UserError, match=r"^a listing names the file [^\n]*$"):
            path_below(tmp_path, name, "a listing")
    else:
        assert path_below(tmp_path, name, "a listing") == tmp_path.joinpath(*parts)


def test_what_is_no_name_and_a_link_out_of_the_folder_are_refused(tmp_path):
    assert not any(map(is_file_name, (None, 5, b"a", ["a"])))
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    (folder / "near").symlink_to("inside")
    (folder / "far").symlink_to(tmp_path)
    assert path_below(folder, "near/a", "a card") == folder / "near" / "a"
    with pytest.raises(UserError, match=r"far/a is a link out of .*folder; delete the link"):
        path_below(folder, "far/a", "a card")
