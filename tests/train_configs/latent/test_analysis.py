"""The verbs of the latent family: their defaults, their tables, and the results that they keep."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.families.latent.test_run import OPTIONS, TASK, WINDOW, config_of
from tests.families.xllm.test_run import config_of as of_mano
from tests.support.tiny import act_as_launched, train_run
from titan_loop.errors import UserError
from titan_loop.evaluation.task_report import TaskReport, graded
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.evaluation_config import SuiteConfig
from train_configs.latent import analysis
from train_configs.latent.analysis import circuit_tables, circuits, repair, solved


@pytest.fixture
def run(tmp_path: Path, alone: None) -> Path:
    """A run of two steps whose states are discrete."""
    return trained(tmp_path / "run")


def trained(folder: Path, **options: Any) -> Path:
    act_as_launched(1)
    config = config_of(folder, replace(OPTIONS, **options))
    config.total_tokens, config.suite = 2 * 4 * WINDOW, SuiteConfig(interval=0)
    train_run(config)
    return folder


def test_shares_are_results_of_the_checkpoint(run: Path, monkeypatch):
    asked: list[Any] = []

    def repaired(model: Any, task: Any, name: str, *, count: int, seed: int) -> float:
        asked.append((name, count, seed, model.config.max_seq_len))
        return 0.25 if name == "5_nodes" else 0.75

    monkeypatch.setattr(analysis, "share_repaired", repaired)
    monkeypatch.setattr(analysis, "share_solved", lambda *_, count: (0.5, 5))
    found = repair(run)
    room = TASK.positions(10)  # the largest graphs, and a probe's node
    assert asked == [("5_nodes", 128, 0, room), ("9_nodes", 128, 0, room)]
    assert (found.record["questions"], found.record["seed"]) == (128, 0)
    assert found.record["repaired"] == {"5_nodes": "0.250", "9_nodes": "0.750"}
    repair(run, strata=("9_nodes",), questions=1, seed=3)
    assert asked[2:] == [("9_nodes", 1, 3, room)]
    found = solved(run, strata=("5_nodes",), questions=64)
    assert [line.split() for line in found.lines[:2]] == [
        ["graphs", "solved", "steps"],
        ["5_nodes", "0.500", "5"],
    ]
    (report,) = TaskReport.all_of(RunDirectory(run))
    assert (report.step, report.tokens, report.trained_recurrent_steps) == (2, 2 * 4 * WINDOW, 4)
    result = report.tasks["solved/5_nodes"]["deepest"]
    assert result.metrics == graded("acc,none", 0.5, 64)
    assert result.mean_steps == 5
    assert report.tasks["repair/5_nodes"]["static:1"].mean_steps == 1
    for verb, options, message in (
        (repair, {"strata": ("7_nodes",)}, "strata=7_nodes: .* has only .*9_nodes"),
        (solved, {"questions": 0}, "questions=0 must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            verb(run, **options)


def test_circuits_ask_graphs_as_large_as_in_training_unless_they_are_told(run: Path, monkeypatch):
    asked: list[Any] = []
    right = SimpleNamespace(right=0.125)

    def find(model: Any, task: Any, **options: int) -> Any:
        asked.append(options)
        return right

    def errors(model: Any, task: Any, found: Any, graphs: Any) -> dict[str, int]:
        asked.append(({len(graph) for graph in graphs}, len(graphs)))
        assert graphs == task.held_out_questions(
            len(graphs), analysis.Size(len(graphs[0]), None), seed=asked[-2]["seed"] + 1
        )
        return {"right": 3}

    monkeypatch.setattr(analysis, "find_circuits", find)
    monkeypatch.setattr(analysis, "classify_errors", errors)
    monkeypatch.setattr(analysis, "asdict", lambda found: {"right": found.right})
    monkeypatch.setattr(analysis, "circuit_tables", lambda record: {})
    found = circuits(run)
    assert asked == [{"nodes": 6, "samples": 128, "seed": 0}, ({6}, 32)]
    assert found.record == {"nodes": 6, "seed": 0, "right": 0.125, "errors": {"right": 3}}
    assert found.lines == ["12.5 % of the probe's values are right"]
    asked.clear()
    circuits(run, nodes=11, samples=2, graphs=1, seed=4)
    assert asked == [{"nodes": 11, "samples": 2, "seed": 4}, ({11}, 1)]
    circuits(run, nodes=4)
    for options in ({"nodes": 3}, {"samples": 1}, {"graphs": 0}):
        with pytest.raises(UserError, match="must be at least 4, 2 and 1"):
            circuits(run, **options)
    for nodes in (2, 12):
        with pytest.raises(UserError, match=f"nodes={nodes} must be from 3, the leaves, to 11"):
            circuits(run, nodes=nodes)


@pytest.mark.usefixtures("alone")
def test_only_models_of_the_family_are_analysed(tmp_path: Path, monkeypatch):
    smooth = trained(tmp_path / "smooth", state="continuous")
    monkeypatch.setattr(analysis, "share_solved", lambda *_, count: (0.5, 5))
    assert solved(smooth).record["solved"]["9_nodes"] == "0.500"
    with pytest.raises(UserError, match="smooth is not a discrete model of the family latent"):
        repair(smooth)
    train_run(of_mano(tmp_path / "mano"))
    with pytest.raises(UserError, match="was not trained on"):
        solved(tmp_path / "mano")


def test_tables_have_a_row_for_each_group_and_leave_out_what_is_empty():
    record = {
        "name_groups": [[0, 2], [], [1], [3]],
        "value_groups": [[1], []],
        "amplification": {"operand 1": {"value": 1.005, "syntax": 2}},
        "frequencies": {"logits": {"0 0": 0.12345, "j j": 12}},
        "errors": {"right": 7},
    }
    assert list(circuit_tables(record).values()) == [
        [
            ["heads that belong to", "operand 1", "operand 2", "result"],
            ["names", "0 2", "-", "1", "3"],
            ["values", "1", "-", ""],
        ],
        [["norm amplification", "value", "syntax"], ["operand 1", "1.00", "2.00"]],
        [["mean norm of the DFT", "0 0", "j j"], ["logits", "0.123", "12"]],
        [["equations", "right"], ["count", "7"]],
    ]
    assert [*circuit_tables({**record, "amplification": {}})] == [
        "Heads by the change they respond to",
        "Frequencies of the last layer",
        "Errors by their source",
    ]
