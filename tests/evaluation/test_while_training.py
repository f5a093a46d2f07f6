"""The suite during a real run: it finds what an evaluation of the checkpoint finds, and leaves
training as it is, on one process and on several.
"""

import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.runs import ask_untrained
from tests.support.tiny import tiny_config, train_run
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.errors import StoppedError
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.evaluation.while_training import evaluations
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory, read_jsonl
from titan_loop.training import preflight
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer

DEPTHS, WINDOWS, QUESTIONS = [1, 3], 3, 4
# The same losses summed in batches of another size, in fp32.
RELATIVE_TOLERANCE = 1e-5


def suite(tasks: list[str], interval: int = 2) -> SuiteConfig:
    return SuiteConfig(
        interval=interval, tasks=tasks, depths=DEPTHS, windows=WINDOWS, questions=QUESTIONS
    )


def train(config: LoopTrainer.Config) -> RunDirectory:
    folder = config.dump_folder
    run_recipe(Recipe(name="one", stages=[Stage(name="one", config=config)]), folder=folder)
    return RunDirectory(folder)


def losses(run: RunDirectory) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in run.read_metrics()]


@pytest.fixture
def unasked(source: Path, alone: None, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of three steps without evaluations, trained once for all tests."""
    folder = tmp_path_factory.getbasetemp() / "unasked"
    return RunDirectory(folder) if folder.exists() else train(tiny_config(source, folder, steps=3))


def test_it_finds_what_the_checkpoint_gives_and_disturbs_nothing(
    source: Path, unasked: RunDirectory, tmp_path: Path
):
    config = tiny_config(source, tmp_path / "held", steps=3)
    config.held_out.interval, config.held_out.depths, config.held_out.windows = 2, [1, 2, 6], 5
    config.suite = suite(["held_out"], interval=3)
    config.metrics.enable_tensorboard = True
    run = train(config)
    assert losses(run) == losses(unasked)  # bit for bit
    assert run.read_metrics()[-1]["data_hash"] == unasked.read_metrics()[-1]["data_hash"]
    *records, suite_record = read_jsonl(run.evals_jsonl)
    assert [record["step"] for record in records] == [2, 3]  # and after the last step
    assert {record["asked"] for record in records} == {"while training"}
    found = evaluate_tasks(
        run.path, TaskOptions(tasks=("held_out",), depths=tuple(DEPTHS), windows=WINDOWS)
    )
    assert suite_record["results"] == pytest.approx(found.flat(), rel=RELATIVE_TOLERANCE)
    for record in records:
        options = TaskOptions(tasks=("held_out",), depths=(1, 2, 6), windows=5)
        found = evaluate_tasks(run.checkpoint(record["step"]), options).flat()
        assert record["results"] == pytest.approx(found, rel=RELATIVE_TOLERANCE)
        assert 3 < record["results"]["held_out/source/nats_per_token/static:6"] < 7
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tb"))
    events.Reload()
    assert len(events.Scalars("held_out/source/bits_per_byte/step_6")) == 2
    assert len(events.Scalars("suite/held_out/source/bits_per_byte/step_3")) == 1


@pytest.mark.usefixtures("alone")
def test_held_out_text_is_scored_unless_told_otherwise(
    source: Path, little_held_out: Path, tmp_path: Path
):
    """At every checkpoint and the end; sources that fill no window are left to a remark."""
    config = tiny_config(source, tmp_path / "run", steps=3)
    config.dataloader.mixture += [f"{little_held_out}=0.01"]
    config.held_out = HeldOutConfig()
    assert config.checkpoint.interval == 2
    records = read_jsonl(train(config).evals_jsonl)
    assert [record["step"] for record in records] == [2, 3]
    assert {name.split("/")[1] for name in records[0]["results"]} == {"source"}
    config.dataloader.mixture = [f"{little_held_out}=1"]
    assert not evaluations(config)
    remarks = list(preflight.remarks(config))
    assert len(remarks) == 1
    assert f"source {little_held_out} holds out" in remarks[0]
    config.dataloader.mixture = [f"{source}=1"]
    assert not list(preflight.remarks(config))
    config.held_out.interval = 0
    assert not evaluations(config)


def ask(source: Path, run: Path, world: int, layout: dict[str, int]) -> TaskReport:
    config = tiny_config(source, run)
    config.model.n_layers = 1
    config.suite = suite(["held_out"])
    return ask_untrained(config, world, layout)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}], ids=["tp", "cp"])
def test_two_ranks_find_what_one_finds(gloo_pool, source: Path, tmp_path: Path, layout, one_rank):
    for report in gloo_pool(2).run(ask, source, tmp_path / "run", 2, layout):
        assert report.flat() == pytest.approx(one_rank.flat(), rel=RELATIVE_TOLERANCE)


@pytest.fixture(scope="module")
def one_rank(gloo_pool, source: Path, tmp_path_factory: pytest.TempPathFactory) -> TaskReport:
    (report,) = gloo_pool(1).run(ask, source, tmp_path_factory.mktemp("one") / "run", 1, {})
    assert report.flat()
    return report


@pytest.mark.parametrize("steps", [5, 2], ids=["between steps", "at the last step"])
def test_a_stop_does_not_wait_for_the_evaluation(
    alone: None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
):
    config = tiny_config(source, tmp_path, steps=steps)
    config.suite = SuiteConfig(interval=1 if steps > 2 else 2, depths=DEPTHS, windows=16)
    batches: list[HeldOutWindows] = []
    rows = HeldOutWindows.rows

    def signalled(windows: HeldOutWindows, *chosen: Any) -> HeldOutWindows:
        batches.append(windows)
        if len(batches) == 2:
            signal.raise_signal(signal.SIGTERM)
            while listener.requested_by is None:
                time.sleep(0.001)
        return rows(windows, *chosen)

    monkeypatch.setattr(HeldOutWindows, "rows", signalled)
    ends = pytest.raises(StoppedError, match="stopped after step 2") if steps > 2 else nullcontext()
    with StopListener() as listener, ends:
        train_run(config, stop_listener=listener)
    assert len(batches) == (3 if steps > 2 else 2)  # the next step's evaluation reads one
    run = RunDirectory(tmp_path)
    assert run.checkpoint(2).is_dir()
    assert not run.evals_jsonl.exists()
