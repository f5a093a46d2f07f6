"""A run of the latent family: examined, analysed, and refused where not."""

from pathlib import Path

import pytest

from tests.families.latent.contract import TASK, run
from tests.support.tiny import act_as_launched, train_run
from titan_loop.cli.main import main
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.evaluation_config import SuiteConfig


@pytest.mark.usefixtures("alone")
def test_a_run_is_examined_analysed_and_not_generated_from(tmp_path: Path, capfd):
    act_as_launched(1)
    config = run(tmp_path / "run", 1)
    config.model.corruption = 0.5  # type: ignore[attr-defined]
    config.suite = SuiteConfig(interval=4, tasks=[TASK.name], depths=[2, 4], questions=8)
    train_run(config)
    folder = str(tmp_path / "run")
    (asked,) = read_jsonl(RunDirectory(folder).evals_jsonl)
    assert {name.split("/")[1] for name in asked["results"]} == {"5_nodes"}  # 9 have no room
    words = ["eval", folder, "--tasks", TASK.name, "--depths", "2", "12", "--limit", "8"]
    assert main([*words, "--max-length", "96"]) == 0
    assert "9_nodes" in capfd.readouterr().out
    assert main(["analyse", "repair", folder, "--questions", "8"]) == 0
    assert "5_nodes" in capfd.readouterr().out
    assert main(["analyse", "solved", folder, "--strata", "9_nodes", "--questions", "8"]) == 0
    assert "9_nodes" in capfd.readouterr().out
    for words, message in (
        (["generate", folder, "--prompt", "x"], "family=latent does not support generate"),
        (["convert", "export", folder, "--output", f"{folder}-hf"], "does not support export"),
        (["eval", folder, "--tasks", TASK.name, "--exit", "kl:0.1,3"], "family=latent does not"),
        (["analyse", "repair", folder, "--strata", "7_nodes"], "strata=7_nodes"),
        (["eval", folder, "--tasks", TASK.name, "--depths", "2"], "not fit into a window of 40"),
    ):
        code = main(words)
        told = capfd.readouterr()
        assert message in told.err + told.out, words
        assert code == 2 or words[0] == "eval"
