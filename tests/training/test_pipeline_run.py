"""Runs on a pipeline of one's own: its state in checkpoints, on ranks that share it, resumed."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.data import pipelines
from tests.support.tiny import BATCH_WINDOWS, act_as_launched, tiny_config, train_run
from tests.training.records import MEASURED
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.cli.main import main
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.pipeline_loader import read_state
from titan_loop.errors import DataEndedError, UserError, exit_code
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.multiprocess

STEPS = 4


def train(
    source: Path, run: Path, world: int, last: int, name: str, parallelism: dict[str, int]
) -> str | None:
    """Train to the step `last` of STEPS; return the refusal, if there is one."""
    act_as_launched(world)
    config = tiny_config(source, run, steps=STEPS)
    config.model.n_layers, config.recurrence.steps = 1, Schedule.constant(1)
    config.training.local_batch_size = 2  # two micro-batches on each of two ranks
    config.dataloader = WindowLoader.Config(
        pipeline=f"{pipelines.__name__}:{name}", tokenizer_path=str(source / "tokenizer.json")
    )
    for field, degree in parallelism.items():
        setattr(config.parallelism, f"{field}_parallel_degree", degree)
    trainer = LoopTrainer(resolve(config, world))
    step = trainer.train_step

    def train_step(data_iterator: Any) -> None:
        step(data_iterator)
        if trainer.step == last < STEPS:
            raise InterruptedError

    trainer.train_step = train_step
    try:
        trainer.train()
    except InterruptedError:
        pass
    except (UserError, DataEndedError) as error:
        return f"exit {exit_code(error)}: {error}"
    finally:
        trainer.close()
    return None


def outcome(run: Path) -> tuple[Any, ...]:
    """Return the records of a run and its last pipelines' states, as far as they must be equal."""
    newest = run / "checkpoints" / f"step-{STEPS}"
    files = sorted(name for name in read_manifest(newest)["files"] if name.startswith("pipeline"))
    states = {name: read_state(newest / name) for name in files}
    records = {record["step"]: record for record in RunDirectory(run).read_metrics()}
    kept = [{k: v for k, v in each.items() if k not in MEASURED} for each in records.values()]
    return kept, {name: state["read_hash"] for name, state in states.items()}


@pytest.mark.parametrize(
    ("world", "parallelism", "files"),
    [(2, {}, 2), (2, {"tensor": 2}, 1)],
)
def test_interrupted_and_resumed_is_uninterrupted(
    world: int, parallelism: dict[str, int], files: int, gloo_pool, source: Path, tmp_path: Path
) -> None:
    pool = gloo_pool(world)

    def run(name: str, last: int) -> None:
        steps = pool.run(train, source, tmp_path / name, world, last, "texts", parallelism)
        assert set(steps) == {None}

    run("whole", STEPS)
    run("parts", 3)  # the checkpoint is of step 2: the third is repeated
    run("parts", STEPS)
    records, hashes = outcome(tmp_path / "whole")
    assert len(records) == STEPS
    assert len(hashes) == files
    assert outcome(tmp_path / "parts") == (records, hashes)
    if parallelism:
        return
    other = 3 - world
    problem = f"saved on {world} data-parallel ranks and cannot go on with {other}"
    for refusal in gloo_pool(other).run(
        train, source, tmp_path / "parts", other, STEPS, "texts", {}
    ):
        assert problem in str(refusal)


def train_on_rows(broken_at: int, *arguments: Any) -> str | None:
    """Train on a pipeline whose last rank breaks at an item, counted over all ranks."""
    pipelines.Rows.broken_at = broken_at
    return train(*arguments)


@pytest.mark.parametrize(
    ("world", "name", "problem"),
    [
        (2, "ending", "after 29 items, ended: let it yield more, or begin again by itself"),
        (2, "failing", "after 29 items, failed (the disk is gone)"),
    ],
)
def test_a_pipeline_that_ends_or_fails_on_one_rank_loses_no_step(
    world: int, name: str, problem: str, gloo_pool, source: Path, tmp_path: Path
) -> None:
    pool = gloo_pool(world)

    def run(folder: str, broken_at: int = 10_000) -> set[str | None]:
        arguments = (source, tmp_path / folder, world, STEPS, name, {})
        return set(pool.run(train_on_rows, broken_at, *arguments))

    in_the_last_step = 2 * BATCH_WINDOWS * STEPS - 6
    for _ in range(2):  # it ends there again, and does not begin again
        (message,) = run("parts", in_the_last_step)
        assert str(message).startswith("exit 2: dataloader.pipeline=")
        assert problem in str(message)
        assert f"rank {world - 1}, " in str(message)
        assert "; stopped after step 3 of 4, 768 of 1,024 tokens: start again" in str(message)
    assert committed_steps(tmp_path / "parts" / "checkpoints") == [2, 3]
    assert run("parts") == run("whole") == {None}
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.usefixtures("alone")
def test_a_run_on_a_pipeline_goes_on_with_its_own_settings(source: Path, tmp_path: Path) -> None:
    config = tiny_config(source, tmp_path / "run", steps=STEPS)
    config.stage = "run"
    config.dataloader = WindowLoader.Config(
        mixture=[f"{source}=1"],  # which the pipeline replaces
        pipeline=f"{pipelines.__name__}:texts",
        tokenizer_path=str(source / "tokenizer.json"),
    )
    config.training.steps = 2  # of 4
    train_run(config)
    assert main(["train", str(tmp_path / "run"), "--training.steps", "3"]) == 0
    log = RunDirectory(tmp_path / "run").log_txt.read_text()
    assert re.findall("changed since the last start: (.*)", log) == ["training.steps 2 → 3"]


def test_ranks_of_one_part_must_read_the_same(gloo_pool, source: Path, tmp_path: Path) -> None:
    for refusal in gloo_pool(2).run(
        train, source, tmp_path / "run", 2, STEPS, "unseeded", {"tensor": 2}
    ):
        assert "rank 1 has read other data than rank 0" in str(refusal)
        assert "set its seeds" in str(refusal)
