"""Reports of tasks: older versions', replacements and damaged files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_loop.errors import RunFailedError, UserError
from titan_loop.evaluation.ngram_baselines import require_gain
from titan_loop.evaluation.task_report import ReadingResult, TaskReport, lower_is_better
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json

HEAD = {"step": 6, "tokens": 600, "trained_recurrent_steps": 2}
DEPTHS: dict[str, Any] = {
    **HEAD,
    "ema": False,
    "baseline_tokens": 99,
    "sources": {
        "code": {
            "depths": {"1": [2.5, 2.4, 2.6], "2": [2.0, 1.9, 2.1]},
            "changes": {"1": [0, 0, 0], "2": [-0.5, -0.6, -0.4]},
            "baselines": {"unigram": 3.0, "bigram": 2.5},
            "windows": 2,
            "n_bytes": 30,
            "units": {"n_bytes": [10, 20], "nats": {"1": [3.5, 4.5], "2": [3.0, 4.0]}},
        }
    },
}
"""A depth-step-6.json of commit dfd5e2b4."""
TASKS: dict[str, Any] = {
    **HEAD,
    "manifest_sha256": "ab",
    "kv_cache": "full",
    "tasks": {"mano": {"static:2": {"metrics": {"acc,none": 0.5}, "mean_steps": 2.0}}},
    "settings": {"mano": "windows=9 limit=3"},
    "failures": {"gone": "why"},
    "skipped": {},
    "ema": False,
}
"""A tasks-step-6.json of that commit."""


def asked(settings: str, *, text: str = "held_out/code", **failures: str) -> TaskReport:
    result = ReadingResult(metrics={"bits_per_byte": len(settings)}, settings=settings)
    tasks = {text: {"static:1": result}} if text else {}
    return TaskReport(**HEAD, manifest_sha256="", tasks=tasks, failures=failures)


def test_both_files_of_an_older_version_are_one_report(tmp_path: Path):
    run = RunDirectory(tmp_path)
    write_json(run.evaluations / "depth-step-6.json", DEPTHS)
    write_json(run.evaluations / "depth-ema-step-6.json", {**DEPTHS, "ema": True})
    write_json(run.evaluations / "tasks-step-6.json", TASKS)
    (report,) = TaskReport.all_of(run)
    assert [*report.tasks] == ["held_out/code", "mano"]
    readings = report.tasks["held_out/code"]
    assert [*readings] == ["static:1", "static:2", "unigram", "bigram"]
    assert readings["static:2"].metrics == {
        "bits_per_byte": 2.0, "bits_per_byte_low": 1.9, "bits_per_byte_high": 2.1,
    }  # fmt: skip
    assert readings["static:2"].units == ["10 20", "3.0 4.0"]
    assert report.tasks["mano"]["static:2"].settings == "windows=9 limit=3"
    assert report.failures == {"gone": "why"}
    (averaged,) = TaskReport.all_of(run, ema=True)
    assert averaged.ema
    assert averaged.tasks["held_out/code"] == readings


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("depth-step-6.json", {"sources": {"code": {"depths": {"1": [1, 2]}}}}),
        ("depth-step-6.json", {"step": "six"}),
        ("tasks-step-6.json", {"tasks": {"mano": {"static:2": {"metrics": {"acc": "x"}}}}}),
        ("tasks-step-6.json", {"tasks": {"a": {"b": {"metrics": {}, "units": ["1 2", "3"]}}}}),
        ("tasks-step-6.json", {"unheard_of": 1}),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str, change: dict):
    run = RunDirectory(tmp_path)
    write_json(run.evaluations / name, {**(DEPTHS if "depth" in name else TASKS), **change})
    with pytest.raises(UserError, match=rf"{name} is damaged .*; evaluate again"):
        TaskReport.all_of(run)


def test_a_smaller_sample_replaces_nothing_and_a_task_that_works_failed_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = RunDirectory(tmp_path)
    asked("", text="", held_out="no text", mano="gone").save(run)
    asked("windows=64 limit=None").save(run)
    for settings, kept in (
        ("windows=4 limit=8", "windows=64 limit=None"),
        ("windows=64 limit=8", "windows=64 limit=None"),
        ("windows=128 limit=None dtype=bfloat16", "windows=128 limit=None dtype=bfloat16"),
    ):
        report = TaskReport.load(asked(settings).save(run))
        assert report.tasks["held_out/code"]["static:1"].settings == kept
    assert report.failures == {"mano": "gone"}
    failed = replace(report, kv_cache="last", tasks={}, failures={"mano": "lost"})
    assert TaskReport.load(failed.save(run)) == replace(report, failures=failed.failures)
    assert "replaced all results" not in caplog.text
    replace(report, kv_cache="last").save(run)
    assert "replaced all results, which were of kv_cache=full" in caplog.text


def test_a_gain_over_a_baseline_can_be_required(tmp_path: Path):
    write_json(tmp_path / "evals" / "depth-step-6.json", DEPTHS)
    (report,) = TaskReport.all_of(RunDirectory(tmp_path))
    require_gain(report, "unigram", 0.33)  # 2.0 against 3.0 bits at the trained R = 2
    require_gain(report, "bigram", 0.19)
    with pytest.raises(
        RunFailedError, match=r"2\.000 bits .* are 33\.3% below the unigram .*3\.000"
    ):
        require_gain(report, "unigram", 0.34)
    del report.tasks["held_out/code"]["static:2"]
    with pytest.raises(UserError, match="needs the trained R = 2 among --depths"):
        require_gain(report, "unigram", 0.1)


def test_the_better_end_of_a_metric_is_the_harnesss():
    import lm_eval.api.metrics  # fills the registry

    known = lm_eval.api.registry.HIGHER_IS_BETTER_REGISTRY
    assert len(known) > 15
    for name, higher in known.items():
        assert lower_is_better(f"{name},none") != higher, name
