"""The front door: quick help without torch, one line for a mistake, documented exit codes."""

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.support.command_lines import refused
from titan_loop.cli import main as cli
from titan_loop.errors import NonFiniteError, RunFailedError, UserError
from titan_loop.launch.record import write_jobs


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# tyro, which reads flags, opens 49, and more for lists among them. A start without torch stays fast
# on any disk, with it on none.
MOST_FILES = 75

COUNT_FILES = """
import sys
files = set()
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and "site-packages" in arguments[0]:
        files.add(arguments[0])
sys.addaudithook(watch)
from titan_loop.cli.main import main
code = main({arguments!r})
heavy = {{"torch", "torchtitan", "numpy"}} & sys.modules.keys()
print(code, len(files), *sorted(heavy), file=sys.stderr)
"""


def start_of(*arguments: str) -> tuple[int, int, list[str]]:
    """Return exit code, number of files of site-packages opened, and heavy packages imported."""
    answer = run_python(COUNT_FILES.format(arguments=arguments))
    assert answer.returncode == 0, answer.stderr
    code, files, *heavy = answer.stderr.splitlines()[-1].split()
    return int(code), int(files), heavy


@pytest.mark.parametrize(
    "arguments", ["recipes", "slurm submit --help", "train quickstrat", "eval --help"]
)
def test_answers_that_need_no_torch_open_few_files(arguments):
    _, files, heavy = start_of(*arguments.split())
    assert not heavy
    assert files < MOST_FILES  # the entry points of every package would be 200 more


@pytest.mark.parametrize("verb", ["status", "slurm status"])
def test_looking_at_a_run_needs_no_torch_and_opens_few_files(verb, own_run, tmp_path, monkeypatch):
    run = own_run
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"total_tokens": 1000}))
    if verb == "slurm status":
        write_jobs(run := tmp_path, {"1a": "7"})
        gone = "echo Invalid job id specified >&2; exit 1"
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{gone}\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    code, files, heavy = start_of(*verb.split(), str(run))
    assert code == 0
    assert not heavy
    assert files < MOST_FILES


@pytest.mark.parametrize("verb", ["plan", "results show"])
def test_a_flag_is_off_by_default(verb, capsys):
    assert cli.main([*verb.split(), "--help"]) == 0
    assert "(default: True)" not in capsys.readouterr().out


def test_unknown_names_are_answered_with_the_nearest(capsys):
    assert refused(capsys, "trains") == "unknown verb 'trains'; nearest: train"
    assert "nearest: tokenize" in refused(capsys, "data", "tokenise")
    assert "unknown recipe 'quickstrat'; nearest: quickstart, quickstart_search" in refused(
        capsys, "train", "quickstrat"
    )
    assert "Unrecognized options: --widnows, 3; Perhaps you meant: --windows INT; see" in refused(
        capsys, "eval", "runs/x", "--widnows", "3"
    )
    assert "no module 'no_such_package'" in refused(capsys, "train", "no_such_package.m:f")


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("tp=3 must divide n_heads=4"), 2, "titan-loop: error: tp=3"),
        (NonFiniteError("10 steps"), 3, "titan-loop: error: 10 steps"),
        (RunFailedError("no space left"), 1, "titan-loop: error: no space left"),
        (OSError(errno.EACCES, "Denied", "/runs/x"), 2, "titan-loop: error: /runs/x: Denied"),
        (OSError(errno.EIO, "No answer", "/runs/x"), 1, "titan-loop: error: /runs/x: No answer"),
        (OSError(errno.ENOSPC, "Full", "/runs/x"), 1, "titan-loop: error: /runs/x: Full"),
        (KeyboardInterrupt(), 130, "titan-loop: interrupted"),
    ],
    ids=["user error", "not finite", "disk full", "EACCES", "EIO", "ENOSPC", "interrupt"],
)
def test_exit_codes(capsys, monkeypatch, raised, code, message):
    def fail(_: object) -> int:
        raise raised

    monkeypatch.setattr("titan_loop.cli.views.recipes", fail)
    assert cli.main(["recipes"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_a_defect_keeps_its_traceback():
    answer = run_python(
        "import sys, titan_loop.cli.views as verb\n"
        "verb.recipes = lambda arguments: 1 / 0\n"
        "from titan_loop.cli.main import main\n"
        "sys.exit(main(['recipes']))"
    )
    assert answer.returncode == 1
    assert "ZeroDivisionError" in answer.stderr


@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "on the way"])
def test_a_reader_that_leaves_is_no_failure(lines):
    """As under `| head`: whether the pipe breaks in the verb's print or in the last flush."""
    code = (
        "import sys, titan_loop.cli.views as verb\n"
        f"verb.recipes = lambda arguments: sys.stdin.read() or print('line\\n' * {lines}) or 0\n"
        "from titan_loop.cli.main import main\n"
        "sys.exit(main(['recipes']))"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as p:
        assert p.stdout is not None
        p.stdout.close()
        assert p.communicate()[1] == b""
    assert p.returncode == 141
