"""The README's example runs as it stands, and its commands are accepted."""

import shlex
from pathlib import Path

import pytest

import titan_loop.evaluation
from titan_loop.cli.eval import _names, _options, _parser

README = Path(titan_loop.evaluation.__path__[0]) / "README.md"


def test_the_example_runs(own_run: Path, monkeypatch: pytest.MonkeyPatch):
    (own_run.parent / "runs").mkdir()
    own_run.rename(own_run.parent / "runs" / "my")
    monkeypatch.chdir(own_run.parent)
    (example,) = README.read_text(encoding="utf-8").split("```python\n")[1:]
    names: dict = {}
    exec(compile(example.split("```")[0], str(README), "exec"), names)
    assert 0 <= names["results"]["results"]["multi_hop"]["acc,none"] <= 1


def eval_commands() -> list[list[str]]:
    lines = README.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith("    titan-loop eval runs")]
    return [shlex.split(line, comments=True)[2:] for line in found]


@pytest.mark.parametrize("command", eval_commands(), ids=" ".join)
def test_the_command_is_accepted(command: list[str]):
    given = _parser().parse(command)
    _options(given, _names(given), frontier=given.frontier).check()


def test_commands_are_found():
    assert len(eval_commands()) == 4
