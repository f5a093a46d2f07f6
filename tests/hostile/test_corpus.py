"""Commands on spoiled files: a case is a number, and README.md says what must not happen.

`TITAN_LOOP_HOSTILE_CASES=FIRST:COUNT` chooses the cases. Each runs in a forked child, so this
process must have no threads, which workers of pytest-xdist have.
"""

import hashlib
import importlib
import json
import os
import pkgutil
from pathlib import Path

import pytest
import titan_loop.compat as compat  # before any torchtitan module
import torch

import titan_loop
from tests.hostile import whole
from tests.hostile.cases import VERBS, Case, cases
from tests.hostile.forked import run_forked
from tests.hostile.spoiling import MARKER_VARIABLE, copied
from titan_loop.cli.main import main

pytestmark = pytest.mark.hostile

FIRST, COUNT = map(int, os.environ.get("TITAN_LOOP_HOSTILE_CASES", "0:300").split(":"))


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole things of every kind, made in a child; this process only imports what children need."""
    for module in pkgutil.walk_packages(titan_loop.__path__, "titan_loop."):
        if "remote_code" not in module.name and module.name != "titan_loop.__main__":
            importlib.import_module(module.name)
    importlib.import_module("tokenizers")
    folder = tmp_path_factory.mktemp("things")

    def build() -> int:
        compat.skip_final_pause()
        whole.build(folder)
        return 0

    made = run_forked(build, folder.with_suffix(".log"), most_seconds=600)
    assert made.code == 0, made.output
    return folder


@pytest.mark.parametrize("case", [*cases(FIRST, COUNT)], ids=lambda case: case.name)
def test_a_spoiled_file_is_refused_or_read_rightly(
    case: Case, things: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, marker = tmp_path / "case", tmp_path / "executed"
    copied(things, folder)
    monkeypatch.setenv(MARKER_VARIABLE, str(marker))
    _, signed = case.prepare(folder)
    before = contents(folder)

    def act() -> int:
        os.chdir(folder)
        compat.skip_final_pause()
        torch.set_num_threads(1)
        return main(VERBS[case.verb].split())

    ending = run_forked(act, tmp_path / "log")
    assert not ending.fault, f"{ending.fault}\n{ending.output}"
    assert not marker.exists(), "code in the file was executed"
    assert contents(folder) == before
    if case.verb == "train" and ending.code == 0 and not may_differ(case, signed=signed):
        last, right = (
            json.loads((run / "metrics.jsonl").read_bytes().splitlines()[-1])
            for run in (folder / "run", things / "finished")
        )
        for name in ("step", "loss", "data_hash"):
            assert last[name] == right[name], name


def contents(folder: Path) -> dict[str, str]:
    """Return a hash of every file that no command may change, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in ("out", "run")
    }


def may_differ(case: Case, *, signed: bool) -> bool:
    """Whether its data was spoiled, or somebody signed other weights, which it trains then."""
    pattern = case.target.pattern
    return pattern.startswith("source/") or (signed and "distcp" in pattern)
