"""Records wait in memory for a disk that fails, in their order, and the lost ones are counted."""

import errno
import os

from titan_loop.storage import kept_records
from titan_loop.storage.json_files import append_jsonl, read_jsonl
from titan_loop.storage.kept_records import append_or_keep, give_up_kept, write_kept


class Disk:
    """Appends, or fails."""

    def __init__(self):
        self.works = False

    def append(self, path, record):
        if not self.works:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_jsonl(path, record)


def test_records_are_written_in_order_once_the_disk_works(tmp_path, caplog):
    path, disk = tmp_path / "log.jsonl", Disk()
    for step in range(3):
        append_or_keep(path, {"step": step}, disk.append)
    assert caplog.text.count("its records are kept in memory") == 1
    disk.works = True
    append_or_keep(path, {"step": 3}, disk.append)
    assert [record["step"] for record in read_jsonl(path)] == [0, 1, 2, 3]
    assert "4 kept records are written, 0 lost" in caplog.text
    caplog.clear()
    append_or_keep(path, {"step": 4}, disk.append)
    write_kept()
    assert caplog.text == ""


def test_the_oldest_of_too_many_are_lost_and_counted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(kept_records, "MOST_KEPT", 2)
    path, disk = tmp_path / "log.jsonl", Disk()
    for step in range(5):
        append_or_keep(path, {"step": step}, disk.append)
    disk.works = True
    write_kept()
    assert [record["step"] for record in read_jsonl(path)] == [3, 4]
    assert "2 kept records are written, 3 lost" in caplog.text


def test_records_that_cannot_be_written_in_the_end_are_counted(tmp_path, caplog):
    disk = Disk()
    for step in range(3):
        append_or_keep(tmp_path / "log.jsonl", {"step": step}, disk.append)
    write_kept()
    give_up_kept()
    assert "log.jsonl lacks 3 records that could not be written" in caplog.text
    assert caplog.text.count("could not be written") == 1
    caplog.clear()
    give_up_kept()
    assert caplog.text == ""
