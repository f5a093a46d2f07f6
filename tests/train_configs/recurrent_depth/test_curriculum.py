"""A curriculum: promoted by its exam, repeated exactly after a kill, stopped where it fails."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.data.tasks.toy_run import TASK
from tests.data.tasks.toy_run import toy_config as config_without
from tests.support.multiprocess import RankError
from tests.support.tiny import BATCH_WINDOWS, SEQ_LEN, act_as_launched, train_run
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.evaluation.while_training import evaluations
from titan_loop.recipes import start
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.callback import Callback
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.recurrent_depth.curriculum import Curriculum, CurriculumLoader

ANYTHING_PASSES = {"interval": 2, "accuracy": 0.0, "questions": 8}


def toy_config(run: Path, **curriculum: Any) -> LoopTrainer.Config:
    config = config_without(run)
    config.dataloader = CurriculumLoader.Config(task=TASK, curriculum=Curriculum(**curriculum))
    return config


class KillAfter(Callback):
    """A callback that ends the process when the others have been called."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run: Path, world: int, kill_after: int | None, save_every: int) -> list[int]:
    act_as_launched(world)
    config = toy_config(run, **ANYTHING_PASSES)
    config.checkpoint.interval = save_every
    trainer = LoopTrainer(resolve(config, world))
    trainer.callbacks += evaluations(config)
    if kill_after is not None:
        trainer.callbacks.append(KillAfter(kill_after))
    trainer.train()
    promotions = trainer.dataloader.state_dict()["promotions"]
    trainer.close()
    return promotions


def stream(run: Path) -> dict[int, str]:
    return {record["step"]: record["data_hash"] for record in RunDirectory(run).read_metrics()}


@pytest.fixture(scope="module")
def whole_run(gloo_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    (promotions,) = gloo_pool(1).run(train, run, 1, None, 3)
    assert promotions == [2 * BATCH_WINDOWS, 4 * BATCH_WINDOWS]
    return run


@pytest.mark.multiprocess
@pytest.mark.parametrize(("world", "save_every"), [(1, 2), (2, 3)])
def test_a_run_killed_at_a_promotion_repeats_its_stream(
    gloo_pool, whole_run: Path, tmp_path: Path, world: int, save_every: int
):
    """Killed right after the promotion of step 4, before its checkpoint, or any that knows it."""
    run = tmp_path / "run"
    with pytest.raises(RankError):
        gloo_pool(world).run(train, run, world, 4, save_every)
    (folder,) = RunDirectory(run).checkpoints.iterdir()
    assert read_manifest(folder)["data"]["promotions"] == [2 * BATCH_WINDOWS]
    for promotions in gloo_pool(world).run(train, run, world, None, save_every):
        assert promotions == [2 * BATCH_WINDOWS, 4 * BATCH_WINDOWS]
    assert stream(run) == stream(whole_run)


def loader(**options: Any) -> CurriculumLoader:
    curriculum = Curriculum(interval=1, questions=4)
    config = CurriculumLoader.Config(task=TASK, curriculum=curriculum, **options)
    return config.build(dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=4)


def longest_word(reader: TaskLoader) -> int:
    ((inputs, _),) = reader.read_step(4)
    return int(inputs["positions"].max()) // 2


def test_what_was_read_ahead_is_discarded_and_the_hash_knows_the_promotion():
    reader, unpromoted = loader(), loader()
    assert (longest_word(reader), longest_word(unpromoted)) == (1, 1)
    assert reader.data_hash == unpromoted.data_hash
    reader.promote()
    assert (reader.level, reader.level_start) == (1, 4)
    assert (longest_word(reader), longest_word(unpromoted)) == (2, 1)
    assert reader.data_hash != unpromoted.data_hash
    resumed = loader(prefetch=False)
    resumed.load_state_dict(reader.state_dict())
    reader.promote()
    resumed.promote()
    assert longest_word(reader) == longest_word(resumed) == 3
    assert reader.data_hash == resumed.data_hash
    assert reader.state_dict()["promotions"] == [4, 8]
    for part in (reader, unpromoted):
        part.close()


def test_a_curriculum_is_part_of_what_the_data_is():
    every_level = TaskLoader.Config(task=TASK).build(
        dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=4
    )
    assert "promotions" not in every_level.state_dict()
    assert longest_word(every_level) == 3
    with pytest.raises(UserError, match="curriculum None → True"):
        loader().load_state_dict(every_level.state_dict())


@pytest.mark.usefixtures("alone")
def test_a_level_that_misses_its_limit_stops_the_run(tmp_path: Path):
    limit = 4 * BATCH_WINDOWS * SEQ_LEN
    config = toy_config(
        tmp_path / "run", interval=2, accuracy=1.0, questions=64, limit_tokens=limit
    )
    with pytest.raises(UserError, match=r"stops at step 4: level 1 of 3: backwards/1_letters \d"):
        train_run(config)
    run = RunDirectory(config.dump_folder)
    first, last = read_jsonl(run.evals_jsonl)
    assert {first["asked"], last["asked"]} == {"promotion"}
    assert {name.split("/")[1] for name in first["results"]} == {"1_letters"}
    assert first["failures"] == {}
    assert "1,024 tokens" in last["failures"]["backwards"]


@pytest.mark.usefixtures("alone")
def test_rate_and_moments_start_again_with_a_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = toy_config(
        tmp_path / "run", **ANYTHING_PASSES, restart_optimizer=True, restart_learning_rate=True
    )
    config.learning_rate = Schedule.warmup_cosine(
        1e-3, start=1e-4, warmup_tokens=BATCH_WINDOWS * SEQ_LEN, total_tokens=10_000
    )
    steps_taken: list[float] = []

    class Watch(KillAfter):
        def on_step_end(self, trainer: LoopTrainer, metrics: Any) -> None:
            (optimizer,) = trainer.optimizers.optimizers
            states = list(optimizer.state.values())
            steps_taken.append(float(states[0]["step"]))
            zero = all(not state["exp_avg"].any() for state in states)
            assert zero == (trainer.step in (2, 4))

    # The config's own callbacks come before the exam, which starts the moments again.
    monkeypatch.setattr(start, "evaluations", lambda config: [*evaluations(config), Watch(0)])
    train_run(config)
    assert steps_taken == [1, 0, 1, 0, 1, 2]
    rates = [record["lr"] for record in RunDirectory(tmp_path / "run").read_metrics()]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[:2] == rates[2:4] == rates[4:]


@pytest.mark.usefixtures("alone")
def test_an_exam_after_every_epoch_of_a_level_read_where_a_policy_halts(tmp_path, monkeypatch):
    """Epochs of 9 and 17 examples have 2 and 3 batches of 8, the last one not full."""
    monkeypatch.setattr(type(TASK), "level_examples", lambda task, level: 9 + 8 * level)
    questions = {**ANYTHING_PASSES, "interval": 0, "recurrent_steps": 3, "exit": "hidden:inf"}
    config = toy_config(tmp_path / "run", **questions)
    assert isinstance(config.dataloader, TaskLoader.Config)
    config.dataloader.window = "example"
    train_run(config)
    asked = read_jsonl(RunDirectory(tmp_path / "run").evals_jsonl)
    assert [record["step"] for record in asked] == [2, 5]
    for record in asked:
        assert {name.rsplit("/", 1)[1] for name in record["results"]} == {"hidden:inf"}
        assert record["results"]["backwards/1_letters/mean_steps/hidden:inf"] == 2  # the earliest


def test_mistakes(tmp_path: Path):
    def refused(match: str, task: Any = TASK, **settings: Any) -> None:
        values = {"interval": 2, "questions": 4, **settings}
        config = toy_config(tmp_path / "run", **values)
        config.dataloader.task = task  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=match):
            resolve(config, 1)

    refused(r"curriculum\.interval=0: give the steps between two exams", interval=0)
    refused("task mano has one level", task=Mano(5, 3))
    refused(r"curriculum\.accuracy=95 must lie between 0 and 1", accuracy=95)
    refused(r"curriculum\.questions=0 must be at least 1", questions=0)
    refused(r"curriculum\.limit_tokens=-1 must be at least 0", limit_tokens=-1)
    config = toy_config(tmp_path / "run", interval=2, exit="kl:1")
    with pytest.raises(UserError, match="exit=kl:1: kl takes 2 number"):
        evaluations(config)
