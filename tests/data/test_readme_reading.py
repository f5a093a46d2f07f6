"""The commands of `load/README.md` for mixing and reading run, and its numbers are the code's."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import titan_loop.data
from titan_loop.cli.main import main
from titan_loop.data.prepare.packing import pack_source
from titan_loop.runs.run_directory import RunDirectory

README = (Path(titan_loop.data.__path__[0]) / "load" / "README.md").read_text()


@pytest.mark.slow
def test_the_commands_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_source: Callable[..., Path],
    documents: Callable,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_source("sources/my", [documents(1, 900, 40)])
    pack_source(write_source("sources/chats", [documents(2, 300, 40)]), seq_len=256)
    (block,) = README.split("```sh\n")[1:]
    commands = block.split("```")[0].replace("\\\n", " ").splitlines()
    assert len(commands) == 2
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "titan-loop"
        assert main(arguments) == 0
    assert "chats" in capfd.readouterr().out
    run = RunDirectory(tmp_path / "runs" / "quickstart")
    last = run.read_metrics()[-1]
    assert last["data/my/tokens"] + last["data/chats/tokens"] == last["tokens"] == 2048
    assert 0 < last["data/my/epochs"] < 4
    assert 0 <= last["data_wait"] < 1
    manifest = json.loads(next(run.path.glob("checkpoints/step-2/manifest.json")).read_text())
    assert manifest["data"]["read"]["tokens"] == [last["data/my/tokens"], last["data/chats/tokens"]]
    assert manifest["data"]["data_hash"] == last["data_hash"]
