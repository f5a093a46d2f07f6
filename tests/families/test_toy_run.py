"""The toy family on the toy task, by the commands: trained, examined, planned, refused."""

from pathlib import Path

import pytest

import tests.families.toy_recipe  # noqa: F401  (registers the family)
from titan_loop.cli import main
from titan_loop.runs.saved_run import SavedRun

RECIPE = "tests.families.toy_recipe:toy"


@pytest.mark.usefixtures("alone")
def test_a_run_is_examined_and_what_it_cannot_is_refused(tmp_path: Path, capfd):
    assert main.main(["train", RECIPE, "--dump-folder", str(tmp_path / "run")]) == 0
    run = str(tmp_path / "run")
    assert SavedRun(run).checkpoint().manifest["trainer"]["architecture"]["update_scale"] == 0.5
    assert main.main(["eval", run, "--tasks", "backwards", "--depths", "1", "3"]) == 0
    assert "backwards" in capfd.readouterr().out
    for words, message in (
        (["convert", "export", run, "--output", f"{run}-hf"], "family=toy does not support export"),
        (["upcycle", run, "--output", f"{run}-deep", "--layers", "4"], "does not support upcycle"),
        (["eval", run, "--tasks", "backwards", "--exit", "q:0.5"], "model.family=toy does not"),
    ):
        assert main.main(words) == 2
        (line,) = [x for x in capfd.readouterr().err.splitlines() if "error" in x]
        assert message in line


def test_the_toy_is_planned(capfd):
    flags = ["--compile.no-enable", "--recurrence.steps", "1"]
    assert main.main(["plan", RECIPE, "--nodes", "1", "--gpus-per-node", "4", *flags]) == 0
    out = capfd.readouterr().out
    assert "update norm" in out  # its own unit travels
