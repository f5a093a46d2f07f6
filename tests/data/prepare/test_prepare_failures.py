"""Preparing when the disk is full, the output cannot be written or the process is killed."""

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.data.shapes.shape import jsonl
from tests.support.failing_disk import largest_file
from tests.support.multiprocess import preloaded_context
from titan_loop.cli.main import main
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.prepare.packing import pack_source
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.source_card import CARD_NAME, LOCK_NAME
from titan_loop.errors import EXIT_USER_ERROR, UserError

FULL = "cannot be written .*finished tasks are kept"


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Return a small file and one that takes about 80 KB as tokens."""
    paths = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    for path, count in zip(paths, (5, 800), strict=True):
        path.write_bytes(jsonl([f"document {n}: {n * n} " * 4 for n in range(count)]))
    return paths


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the open shard's
def test_a_file_that_cannot_grow(files, small_tokenizer, tmp_path):
    out = tmp_path / "out"
    options = {"tokenizer": small_tokenizer, "tasks": 2, "held_out_fraction": 0}
    with largest_file(30_000), pytest.raises(UserError, match=FULL):
        tokenize_source(files, output=out, **options)
    assert not (out / CARD_NAME).exists()
    assert [path.name for path in (out / "logs/train/completions").iterdir()] == ["00000"]
    again = tokenize_source(files, output=out, **options)
    whole = tokenize_source(files, output=tmp_path / "whole", **options)
    assert again.splits == whole.splits


def command(files: list[Path], tokenizer: Path, out: Path, *more: str) -> list[str]:
    return [
        *("data", "tokenize"),
        *map(str, files),
        *("--output", str(out), "--tokenizer", str(tokenizer), "--held-out-fraction", "0", *more),
    ]


def test_what_a_worker_process_finds_is_said_in_one_line(files, small_tokenizer, tmp_path, capfd):
    broken = tmp_path / "2.jsonl.gz"
    broken.write_bytes(gzip.compress(files[1].read_bytes())[:-9])
    workers = ("--tasks", "3", "--workers", "2")
    words = command([*files, broken], small_tokenizer, tmp_path / "out", *workers)
    assert main(words) == EXIT_USER_ERROR
    said = capfd.readouterr().err
    assert "2.jsonl.gz cannot be read to its end" in said.splitlines()[-1]
    assert "Traceback" not in said


def run_in_a_session(words: list[str]) -> None:
    os.setsid()
    sys.exit(main(words))


def test_a_killed_preparation_goes_on(files, small_tokenizer, tmp_path):
    """Killed at any moment after its first task, it ends like one that ran through."""
    more = [tmp_path / f"{number}.jsonl" for number in range(2, 8)]
    for path in more:
        path.write_bytes(files[1].read_bytes())
    every, out = [*files, *more], tmp_path / "out"
    started = command(every, small_tokenizer, out, "--tasks", "8")
    process = preloaded_context().Process(target=run_in_a_session, args=(started,))
    process.start()
    completions = out / "logs/train/completions"
    while process.exitcode is None and not (completions / "00000").exists():
        time.sleep(0.005)
    process.kill()
    process.join()
    done = {path.name: path.stat().st_mtime_ns for path in completions.iterdir()}
    assert 1 <= len(done) < 8, "killed too late to tell anything"
    options = {"tokenizer": small_tokenizer, "tasks": 8, "held_out_fraction": 0}
    again = tokenize_source(every, output=out, **options)
    assert {name: (completions / name).stat().st_mtime_ns for name in done} == done
    whole = tokenize_source(every, output=tmp_path / "whole", **options)
    assert again.splits == whole.splits
    assert list(verify_source(out)) == []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the killed one left waiting


def test_one_process_at_a_time_prepares_a_source(files, small_tokenizer, tmp_path):
    out = tmp_path / "out"
    holder = (
        "import sys; from pathlib import Path\n"
        "from titan_loop.data.source_card import lock_source\n"
        "lock = lock_source(Path(sys.argv[1]), 'output'); print('held', flush=True)\n"
        "sys.stdin.read()"
    )

    @contextmanager
    def held() -> Iterator[int]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", holder, str(out)], **pipes) as process:
            assert process.stdout.readline() == b"held\n"
            yield process.pid
            process.kill()

    # What the killed process left means nothing, nor is it read where outputs lie among inputs.
    options = {"tokenizer": small_tokenizer, "pattern": ["*"], "format": "jsonl"}
    with held() as holder_pid:
        said = rf"out is in use by another preparation \(process {holder_pid} on .*; wait for it"
        with pytest.raises(UserError, match=f"output .*{said}"):
            tokenize_source(tmp_path, output=out, **options)
        assert [path.name for path in out.iterdir()] == [LOCK_NAME]
    card = tokenize_source(tmp_path, output=out, **options)
    assert sum(split.documents for split in card.splits.values()) == 805
    with held(), pytest.raises(UserError, match=r"source .*out is in use by another prepara"):
        pack_source(out, seq_len=256)
    assert pack_source(out, seq_len=256)
    assert list(verify_source(out)) == []
