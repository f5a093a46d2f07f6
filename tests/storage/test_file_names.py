"""Names of files that others wrote stay in their folder, or are refused."""

import pytest

from titan_loop.errors import UserError
from titan_loop.storage.file_names import is_file_name, require_file_name

REFUSED = (
    *("", ".", "..", "/", "a/", "/etc/passwd", "../a", "a\0b", "a\nb", "\x1b[31m", "\ud800"),
    *("a\\b", "C:", "C:a", "é" * 128, "a" * 256, None, 5, b"a", ["a"]),
)
NAMES = ("a", "source.json", "00000_doc_shuffled.ds", ".metadata", "é x")


def test_no_name_leads_out_of_the_folder():
    assert all(map(is_file_name, NAMES))
    for name in REFUSED:
        with pytest.raises(UserError, match=r"^a listing names the file [^\n]*$"):
            require_file_name(name, "a listing")
