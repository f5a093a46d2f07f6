"""train_configs/README.md: its recipe trains, and its commands run one after the other."""

import re
import shlex
import sys
from glob import glob
from pathlib import Path

import pytest

import train_configs
from tests.data.shapes.shape import jsonl
from tests.support.tiny import standard_library_texts
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_OK
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.runs.run_directory import RunDirectory

README = Path(train_configs.__path__[0]) / "README.md"


FIRST_RUN, REST = README.read_text(encoding="utf-8").split("## A recipe is a function")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands_of(text: str) -> list[list[str]]:
    return [
        shlex.split(line, comments=True)[1:]
        for block in blocks(text, "sh")
        for line in block.replace("\\\n", " ").splitlines()
    ]


def test_every_folder_of_recipes_is_in_the_table():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    folders = {path.parent.name for path in README.parent.glob("*/__init__.py")}
    assert folders <= named


def test_tables_that_a_study_names_exist():
    texts = [path.read_text(encoding="utf-8") for path in README.parent.glob("*/README.md")]
    tables = re.findall(r"--csv (\S+)", "".join(texts))
    assert tables
    assert [table for table in tables if not (README.parents[1] / table).is_file()] == []


@pytest.mark.usefixtures("alone")
def test_the_recipe_and_the_commands_run(source, tmp_path, monkeypatch, capfd):
    (module,) = blocks(REST, "python")
    (tmp_path / "my_recipe.py").write_text(module)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "my").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_recipe", raising=False)
    commands = commands_of(REST)
    assert len(commands) == 8
    for command in commands:
        assert main(command) == EXIT_OK, command
    out = capfd.readouterr().out
    assert "└─ annealing  complete, 4,096 tokens" in out
    assert "everything is trained" in out

    runs = tmp_path / "runs"
    last = read_manifest(runs / "other" / "annealing" / "checkpoints" / "step-4")
    assert last["trainer"]["recurrent_steps"] == 2
    assert not (runs / "other" / "pretraining" / "checkpoints" / "step-8").exists()
    gates = [
        RunDirectory(runs / "my_recipe" / name).read_metrics() for name in ("gate", "gate-again")
    ]
    assert [[r["loss"] for r in gate] for gate in gates] == [[r["loss"] for r in gates[0]]] * 2
    forked = read_manifest(runs / "fork" / "annealing" / "checkpoints" / "step-4")["lineage"]
    assert forked["origin"]["path"].endswith("my_recipe/pretraining/checkpoints/step-4")


@pytest.mark.usefixtures("alone")
def test_the_first_own_run_shows_what_the_page_says(tmp_path, monkeypatch, capfd):
    (module,) = blocks(FIRST_RUN, "python")
    (tmp_path / "first.py").write_text(module)
    (tmp_path / "my").mkdir()
    for number in range(2):
        content = jsonl(standard_library_texts(60)[number::2])
        (tmp_path / "my" / f"{number}.jsonl").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "first", raising=False)
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"):  # left by runs in this process
        monkeypatch.delenv(name, raising=False)
    printed: dict[str, str] = {}
    for command in commands_of(FIRST_RUN):
        words = [name for word in command for name in (sorted(glob(word)) or [word])]
        assert main(words) == EXIT_OK, command
        printed[" ".join(command[: 2 if command[0] == "data" else 1])] = "".join(capfd.readouterr())
    assert len(printed) == 10
    assert "holds out" not in printed["data tokenize"]  # enough to score
    assert "first: 30,208 tokens in 472 windows of 64" in printed["data plan"]
    trained = printed["train"]
    assert "model.vocab_size=512, the vocabulary of the data" in trained
    assert "n_layers=1 instead of 2, vocab_size=512 instead of 128" in trained
    assert trained.count("evaluated, step ") == 2
    assert "WARNING" not in trained
    (report,) = TaskReport.all_of(RunDirectory("runs/first"))
    bits = {n: each.metrics["bits_per_byte"] for n, each in report.tasks["held_out/my"].items()}
    assert bits["static:4"] < bits["unigram"]
    charts = {Path(line).name for line in printed["plot"].split()}
    assert {"loss_per_step.png", "held_out.png", "depths.png"} <= charts
    assert Path("runs/first/report.html").is_file()
    assert "[40 tokens in" in printed["generate"]
    assert "ends in a space" not in printed["generate"]
    assert printed["status"].endswith("everything is trained\n")
