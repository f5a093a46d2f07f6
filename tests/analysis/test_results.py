"""A run's result is what it recorded at its last step, and tables put it beside a paper's."""

import json
import math
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from titan_loop.analysis.results import (
    ResultTable,
    RunResult,
    differences_text,
    runs_text,
    table_text,
)
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.evaluation.evals_log import WHILE_TRAINING, append_evaluation
from titan_loop.evaluation.task_report import ReadingResult, TaskReport
from titan_loop.runs.run_directory import RunDirectory, is_clean, source_commit
from titan_loop.storage.json_files import append_jsonl, write_json, write_text

TABLE = ResultTable(
    name="solved",
    title="% solved",
    rows={"looped": {"stage": "looped"}, "not": {"stage": "not_looped"}},
    columns={"2": {"stratum": "2"}, "8": {"stratum": "8"}},
    everywhere={"task": "mano", "metric": "acc,none", "reading": "static:4"},
    paper={"looped": {"2": 100, "8": 97.62}},
    columns_are="operations",
    against_flops="8",
)
COMMAND = ["titan-loop", "train", "tests.analysis.test_results:mine", "--stage", "looped"]
TABLES = {"mine": [TABLE, replace(TABLE, name="none", title="none", everywhere={})]}


def mine() -> None:
    """Stand for a recipe; its module declares its tables."""


def trained(folder: Path, *, seed: int = 42, command: tuple[str, ...] = ()) -> RunDirectory:
    run = RunDirectory(folder)
    config = {"stage": "looped", "debug": {"seed": seed}, "dataloader": {"task": {"modulus": 5}}}
    run.create_or_open([*COMMAND, *command], config=config)
    for step in range(1, 101):
        record = {"step": step, "tokens": 10 * step, "loss": 1 / step, "tokens_per_second": 5.0}
        if step == 1:
            record["loss"] = math.nan  # null in JSON, and no point of the curve
        record["flops_per_token"] = 2.0 if step <= 50 else 4.0
        append_jsonl(run.metrics_jsonl, record)
    return run


def asked(run: RunDirectory, step: int, **accuracies: float) -> TaskReport:
    report = TaskReport(step=step, tokens=0, trained_recurrent_steps=4, manifest_sha256="")
    for name, value in accuracies.items():
        reading = ReadingResult(metrics={"acc,none": value}, mean_steps=4.0)
        report.tasks[f"mano/{name.strip('_')}"] = {"static:4": reading}
    return report


def test_a_run_leaves_its_last_evaluation_and_how_it_was_made(tmp_path):
    flags = ("--dump-folder=here", "--debug.seed", "7", "--stages.looped.total-tokens", "1 000")
    run = trained(tmp_path, seed=7, command=flags)
    for step, value in ((50, 0.25), (100, 0.5)):
        report = asked(run, step, _2=value, _8=value)
        append_evaluation(run, report, asked=WHILE_TRAINING, seconds=1)
    asked(run, 100, _8=0.75).save(run)  # later, by `titan-loop eval`
    goes_on = ["titan-loop", "train", str(run.path), "--best"]  # with its own settings
    run.create_or_open(goes_on, config=json.loads(run.config_json.read_text()))
    result = RunResult.of(run)
    assert (result.recipe, result.stage, result.seed) == (COMMAND[2], "looped", 7)
    assert result.overrides == [*flags[1:], "--best"]
    assert result.task == {"modulus": 5}
    assert (result.steps, result.tokens, result.seconds) == (100, 1000, 200.0)
    assert result.flops == 500 * 2 + 500 * 4
    assert result.results["mano/2/acc,none/static:4"] == 0.5
    assert result.results["mano/8/acc,none/static:4"] == 0.75
    assert 1 < result.losses[0][0] < len(result.losses) <= 40
    assert result.losses[-1] == [100, 0.01]
    (saved,) = RunResult.all_of(result.save(tmp_path / "results").parent)
    assert saved == result
    assert saved.commit == run.read_run()["commit"]


def test_a_result_of_an_older_step_is_said_and_its_documents_go_with_it(tmp_path, caplog):
    run, name = trained(tmp_path), "held_out/a/bits_per_byte/static:1"
    for step, bits in ((50, 2.0), (100, 1.0)):
        text = ReadingResult(metrics={"bits_per_byte": bits}, units=["3 4", "5.0 6.0"])
        report = replace(asked(run, step), tasks={"held_out/a": {"static:1": text}})
        if step == 50:
            report.save(run)
            old = RunResult.of(run)
            assert (old.results[name], [*old.units]) == (2.0, [name])
            assert "results are of step 50, the run was trained to step 100" in caplog.text
            caplog.clear()
        else:
            append_evaluation(run, report, asked=WHILE_TRAINING, seconds=1)
            new = RunResult.of(run)
            assert (new.results[name], new.units) == (1.0, {}), "no document of step 50"
            assert not caplog.text


def test_results_of_an_analysis_and_documents_of_text_belong_to_the_result(tmp_path):
    run = trained(tmp_path)
    report = asked(run, 100, _2=0.5)
    text = ReadingResult(metrics={"bits_per_byte": 2.0}, units=["3 4", "5.0 6.0"])
    for ema in (False, True):
        replace(report, ema=ema, tasks={"held_out/a": {"static:1": text}}).save(run)
    name = "held_out/a/bits_per_byte/static:1"
    found = RunResult.of(run)
    assert found.results == {name: 2.0, f"{name},ema": 2.0}
    assert found.units == {key: ["3 4", "5.0 6.0"] for key in (name, f"{name},ema")}
    for path in run.evaluations.iterdir():
        path.unlink()
    report.save(run)
    record = {"results": {"mano/2/intervention/alpha:0.1": 0.25}, "step": 100}
    write_json(run.evaluations / "intervention-step-100.json", record)
    write_json(run.evaluations / "intervention-step-50.json", {**record, "step": 50})
    write_json(run.evaluations / "lens-step-150.json", {"step": 150})
    assert RunResult.of(run).results == {
        "mano/2/acc,none/static:4": 0.5,
        "mano/2/mean_steps/static:4": 4.0,
        "mano/2/intervention/alpha:0.1": 0.25,
    }


def test_a_cell_is_the_mean_over_seeds_beside_the_papers():
    results = results_of(looped={1: 0.9, 2: 1}, not_looped={1: 0.125})
    assert table_text(TABLE, results).splitlines()[2:] == [
        "| looped | - | 95.0 [31.5, 100.0] |",
        "| looped, paper | 100.0 | 97.6 |",
        "| not | - | 12.5 (1 seed) |",
    ]


def test_a_run_without_a_finite_loss_is_listed():
    assert "| looped | 1 | 1 | 1 | - | 1 | - | - |" in runs_text(results_of(looped={1: 0.9}))


def results_of(**seeds: dict[int, float]) -> list[RunResult]:
    """Return results of the stages named, with a share of right answers at 8 operations by seed."""
    shared = {"recipe": "mine", "overrides": [], "commit": None, "machine": "", "versions": {}}
    shared |= {"tokens": 1, "steps": 1, "seconds": 1, "losses": []}
    return [
        RunResult(stage=stage, seed=seed, results={"mano/8/acc,none/static:4": value}, **shared)
        for stage, values in seeds.items()
        for seed, value in values.items()
    ]


def test_rows_are_compared_on_the_same_documents():
    """Over 30 documents; the difference is far smaller than documents differ."""
    rng = np.random.default_rng(0)
    n_bytes = rng.integers(100, 900, 30)
    hard = rng.uniform(1, 3, 30) * n_bytes * math.log(2)
    table = replace(TABLE, factor=1.0, digits=3, less="not")

    def result(stage: str, seed: int, bits_less: float, n_bytes: np.ndarray = n_bytes) -> RunResult:
        nats = hard - bits_less * n_bytes * math.log(2)
        texts = [" ".join(map(str, part)) for part in (n_bytes, nats)]
        name = "mano/2/acc,none/static:4"
        return RunResult(
            recipe="r", stage=stage, seed=seed, overrides=[], commit=None, machine="", versions={},
            tokens=0, steps=0, seconds=0.0, losses=[], results={name: 0.0}, units={name: texts},
        )  # fmt: skip

    runs = [result("not_looped", 1, 0.0), result("not_looped", 2, 0.01), result("looped", 1, 0.06)]
    found = table.difference(runs, "looped", "2")
    assert found is not None
    assert found[1] == 1
    assert found[0] == pytest.approx((-0.06, -0.06, -0.06)), "of seed 1, which both have"
    runs.append(result("looped", 2, 0.03))
    found = table.difference(runs, "looped", "2")
    assert found is not None
    half = 12.7062 * 0.02  # Student's quantile of two seeds, and their standard error
    assert found[0] == pytest.approx((-0.04, -0.04 - half, -0.04 + half), rel=1e-4)
    assert "| looped | -0.040 [-0.294, +0.214] | - |" in differences_text(table, runs)
    runs[-1] = result("looped", 2, 0.03, n_bytes + 1)
    assert table.difference(runs, "looped", "2") is None, "they read other documents"


def test_the_commands_write_and_show(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("titan_loop.analysis.results.is_clean", lambda commit: True)
    run = trained(tmp_path / "run")
    asked(run, 100, _8=0.5).save(run)
    folder = tmp_path / "results"
    assert main(["results", "add", str(run.path), "--folder", str(folder)]) == 0
    written = folder / "mine" / "looped-seed42.json"
    assert capsys.readouterr().out == f"{written}\n"
    assert main(["results", "show", COMMAND[2], "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "| looped | - | 50.0 (1 seed) |" in shown
    assert "| 3.00e+03 |" in shown
    assert "| none |" not in shown
    for name in ("mine-solved.png", "mine-solved-flops.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    written.write_text(json.dumps(asdict(RunResult.of(run)) | {"later": 1}))
    assert main(["results", "show", COMMAND[2], "--folder", str(folder)]) == 2
    assert f"{written} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("commit", [None, "0123456789ab", "HEAD-dirty"])
def test_a_result_of_changed_or_unknown_code_is_refused_or_marked(tmp_path, capsys, commit):
    run = trained(tmp_path / "run")
    asked(run, 100, _8=0.5).save(run)
    record = json.loads(run.run_json.read_text())
    restarts = [{**record, "commit": "HEAD"}]  # clean, which does not mend the first start
    run.run_json.write_text(json.dumps({**record, "commit": commit, "restarts": restarts}))
    words = ["results", "add", str(run.path), "--folder", str(tmp_path / "results")]
    assert main(words) == 2
    assert f"commit {commit}, which is not in this checkout" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    assert main([*words, "--unclean"]) == 0
    assert main(["results", "show", COMMAND[2], "--folder", str(tmp_path / "results")]) == 0
    shown = capsys.readouterr().out
    assert "| looped † | - | 50.0 (1 seed) |" in shown
    assert f"| {commit or '-'} † |" in shown
    assert "†: of uncommitted code" in shown


def test_only_changed_code_makes_a_commit_unclean(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    kept = [
        "titan_loop/__init__.py",
        "train_configs/s/results/r/a-seed1.json",
        "train_configs/s/r.py",
    ]
    for name in kept:
        write_text(tmp_path / name, "1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr("titan_loop.__file__", str(tmp_path / kept[0]))
    commit = source_commit()
    assert commit is not None
    assert is_clean(commit)
    write_text(tmp_path / kept[1], "2\n")
    assert source_commit() == commit
    write_text(tmp_path / kept[2], "2\n")
    assert source_commit() == f"{commit}-dirty"
    assert not is_clean(source_commit())


@pytest.mark.parametrize(
    ("name", "damage", "fix"),
    [
        ("results", {"units": {"a": ["1 2", "3"]}}, "write it again"),
        ("results", {"results": {"a": "x"}}, "write it again"),
        ("results", {"x": 1}, "write it again"),
        ("evals", {"results": []}, "analyse the run again"),
        ("evals", {"step": "x"}, "analyse the run again"),
    ],
)
def test_a_damaged_record_is_one_line(tmp_path: Path, name: str, damage: dict, fix: str):
    run = trained(tmp_path / "run")
    result = RunResult.of(run)
    record = {"results": {"a": 0.5}, "step": 4} if name == "evals" else asdict(result)
    path = run.evaluations / "intervention-step-4.json"
    if name == "results":
        path = result.save(tmp_path / "results")
    write_json(path, record | damage)
    with pytest.raises(UserError, match=rf"^{path} is damaged .*{fix}"):
        RunResult.of(run) if name == "evals" else RunResult.all_of(path.parent)


def test_mistakes(tmp_path, capsys):
    assert main(["results", "show", COMMAND[2], "--folder", str(tmp_path)]) == 2
    assert f"{tmp_path / 'mine'} has no result" in capsys.readouterr().err
    assert main(["results", "show", "nanbeige_quickstart"]) == 2
    assert "has no TABLES['nanbeige_quickstart']" in capsys.readouterr().err
    RunDirectory(tmp_path / "a").create_or_open(["python", "mine.py"], config={})
    with pytest.raises(UserError, match=r"started by 'python mine\.py', not by titan-loop train"):
        RunResult.of(RunDirectory(tmp_path / "a"))
    repeats = ["titan-loop", "train", "a/config.json"]
    RunDirectory(tmp_path / "b").create_or_open(repeats, config={})
    with pytest.raises(UserError, match=r"repeats a/config\.json, which has no tables"):
        RunResult.of(RunDirectory(tmp_path / "b"))
