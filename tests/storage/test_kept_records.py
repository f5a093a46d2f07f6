"""Records wait in memory for a disk that fails, in their order, and the lost ones are counted."""

import errno
import os

from titan_loop.storage.json_files import append_jsonl, read_jsonl
from titan_loop.storage.kept_records import append_or_keep, give_up_kept, write_kept


def test_records_are_written_in_order_once_the_disk_works_or_counted_in_the_end(tmp_path, caplog):
    path, works = tmp_path / "log.jsonl", False

    def append(path, record):
        if not works:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_jsonl(path, record)

    for step in range(3):
        append_or_keep(path, {"step": step}, append)
    write_kept()
    assert caplog.text.count("its records are kept in memory") == 1
    works = True
    append_or_keep(path, {"step": 3}, append)
    assert [record["step"] for record in read_jsonl(path)] == [0, 1, 2, 3]
    assert caplog.text.count("the kept records are written") == 1
    caplog.clear()
    append_or_keep(path, {"step": 4}, append)
    write_kept()
    give_up_kept()
    assert caplog.text == ""
    works = False
    for step in range(3):
        append_or_keep(path, {"step": step}, append)
    give_up_kept()
    give_up_kept()
    assert caplog.text.count("log.jsonl lacks 3 records that could not be written") == 1
