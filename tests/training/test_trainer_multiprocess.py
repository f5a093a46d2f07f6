"""Several ranks: one consistent run at every world size, one decision about non-finite steps."""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import multiprocess
from tests.support.multiprocess import GlooPool, RankError
from tests.support.tiny import BATCH_TOKENS, act_as_launched, tiny_config, train_run
from tests.training.records import RELATIVE_TOLERANCE, assert_same_records
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.distributed.kept_layouts import KeptLayouts
from titan_loop.errors import NonFiniteError, StoppedError
from titan_loop.evaluation.while_training import evaluations
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.callback import Callback
from titan_loop.training.resolved_run import resolve
from titan_loop.training.schedule import Schedule
from titan_loop.training.stop_request import StopListener
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.multiprocess


STEPS = 4  # R falls after two; a checkpoint every two
DEPTHS = Schedule.steps([(0, 2), (STEPS * BATCH_TOKENS // 2, 1)])


def make_trainer(source: Path, run: Path, world: int, **changes: Any) -> LoopTrainer:
    """Build a trainer on the first `world` ranks' layout, as a launcher would have."""
    act_as_launched(world)
    config = tiny_config(source, run, steps=STEPS)
    config.recurrence.steps = DEPTHS
    config.model.n_layers = 1
    config.parallelism.tensor_parallel_degree = changes.get("tp", 1)
    config.parallelism.context_parallel_degree = changes.get("cp", 1)
    config.parallelism.data_parallel_replicate_degree = changes.get("replicate", 1)
    config.training.local_batch_size = changes.get("local_batch", 2)
    config.held_out.interval = changes.get("held_out", 0)
    config.held_out.windows = 5
    config.max_skipped_steps = changes.get("max_skipped_steps", 10)
    config.metrics.log_freq = changes.get("log_freq", 1)
    resolved = resolve(config, world)
    # Refused without a GPU, but FSDP moves the weights in the same way.
    resolved.config.training.enable_cpu_offload = changes.get("cpu_offload", False)
    trainer = LoopTrainer(resolved)
    trainer.callbacks += evaluations(config)
    return trainer


def stages_case(source: Path, runs: Path) -> list[int]:
    """Train two stages of HSDP with Muon; return how many groups there are after each."""
    act_as_launched(4)
    left: list[int] = []
    layouts = KeptLayouts()
    for number in range(2):
        config = tiny_config(source, runs / str(number), steps=2)
        config.training.steps, config.training.local_batch_size = 1, 4
        config.model.n_layers = 1
        config.recurrence.steps = Schedule.constant(1)
        config.parallelism.data_parallel_replicate_degree = 2
        config.parallelism.tensor_parallel_degree = 2
        config.optimizer.name = "muon"
        config.checkpoint.enable = False
        trainer = LoopTrainer(resolve(config, 4), layouts)
        trainer.train()
        trainer.close(together=True)
        left.append(dist.get_pg_count())
    return left


def test_stages_share_their_process_groups(source, tmp_path):
    """In new processes: torch takes an equal mesh of an earlier test for that of the run."""
    with GlooPool(4) as pool:
        for left in pool.run(stages_case, source, tmp_path):
            assert left[0] == left[1]


def train(source: Path, run: Path, world: int, changes: dict[str, Any]) -> None:
    trainer = make_trainer(source, run, world, **changes)
    trainer.train()
    trainer.close()


def train_with_a_nan_on_rank_one(source: Path, run: Path, world: int, steps: list[int]) -> Any:
    """Inject a NaN into one local gradient of rank 1 only; report what every rank did."""
    # Steps 1 and 4 are logged, 2 and 4 saved: the verdict on 3 is read a step later.
    trainer = make_trainer(source, run, world, max_skipped_steps=2, log_freq=10)
    updates: list[int] = []
    real_step = trainer.optimizers.step

    class Poison(Callback):
        def on_gradients(self, trainer: LoopTrainer) -> None:
            if dist.get_rank() == 1 and trainer.step in steps:
                trainer.model.tok_embeddings.weight.grad.to_local().fill_(float("nan"))

    def step() -> None:
        weight = trainer.model.norm.weight.detach().to_local()
        before = weight.clone()
        real_step()
        if not torch.equal(before, weight):
            updates.append(trainer.step)

    trainer.callbacks.append(Poison())
    trainer.optimizers.step = step
    error = ""
    try:
        trainer.train()
    except NonFiniteError as caught:
        error = str(caught)
    trainer.close()
    finite = all(torch.isfinite(p.to_local()).all() for p in trainer.model.parameters())
    return updates, error, finite, trainer.step


def records(run: Path) -> list[dict[str, Any]]:
    return RunDirectory(run).read_metrics()


LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2-cpu-offload": (2, {"cpu_offload": True}),
    "cp2": (2, {"cp": 2, "local_batch": 8}),
    "dp2-tp2": (4, {"tp": 2, "local_batch": 4}),
    "hsdp2x2": (4, {"replicate": 2}),
}


@pytest.fixture(scope="module")
def runs(source: Path, tmp_path_factory: pytest.TempPathFactory, gloo_pool) -> dict[str, Path]:
    """The same run on every layout, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, (world, changes) in LAYOUTS.items():
        gloo_pool(world).run(train, source, folder / name, world, {**changes, "held_out": 2})
    return {name: folder / name for name in LAYOUTS}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_trains_the_same_run(runs, layout):
    """Same initial weights, windows, schedules, metrics and held-out losses as one process."""
    assert_same_records(records(runs[layout]), records(runs["one"]))
    got, want = (RunDirectory(runs[name]).evals_jsonl for name in (layout, "one"))
    for record, expected in zip(read_jsonl(got), read_jsonl(want), strict=True):
        assert record["step"] == expected["step"]
        assert record["results"] == pytest.approx(expected["results"], rel=RELATIVE_TOLERANCE)
    assert len(read_jsonl(want)) == 2


def continue_from(
    source: Path, run: Path, world: int, changes: dict[str, Any], origins: list[Path]
) -> None:
    """Load step 2 of each origin into one trainer and train two steps; all go to one file."""
    trainer = make_trainer(source, run, world, **changes)
    trainer.batch_generator(None)
    for origin in origins:
        trainer.checkpointer.path = origin
        assert trainer.checkpointer.load()
        for _ in range(2):
            trainer.step += 1
            trainer.train_step(iter(()))
    trainer.close()


@pytest.mark.parametrize("layout", ["one", "cp2", "dp2-tp2"])
def test_a_checkpoint_of_any_layout_continues_on_any_other(
    gloo_pool, source, runs, tmp_path, layout
):
    """Losses after resharding equal the run that never stopped; so do LR, R, β and the data.

    One process reads every layout's checkpoint; the others read whole tensors and those cut along
    two dimensions, since pieces cut along one are read in the same way.
    """
    world, changes = LAYOUTS[layout]
    origins = [runs["one"], runs["dp2-tp2"]]
    if layout == "one":
        origins = [*runs.values()]
    copies = [tmp_path / origin.name for origin in origins]
    for origin, copy in zip(origins, copies, strict=True):
        shutil.copytree(origin / "checkpoints" / "step-2", copy / "step-2")
    gloo_pool(world).run(continue_from, source, tmp_path / "run", world, changes, copies)
    continued = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    expected = records(runs["one"])[2:] * len(origins)
    for got, want in zip(continued, expected, strict=True):
        for key in ("step", "tokens", "lr", "recurrent_steps", "entropy_weight", "data_hash"):
            assert got[key] == want[key], (got["step"], key)
        assert got["loss"] == pytest.approx(want["loss"], rel=RELATIVE_TOLERANCE)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=RELATIVE_TOLERANCE)


def poison_a_weight_of_rank_one(source: Path, run: Path, world: int) -> str:
    """Put a NaN into rank 1's shard of a weight after step 4; return what the run ended with."""
    trainer = make_trainer(source, run, world)
    real_step = trainer.optimizers.step

    def step() -> None:
        real_step()
        if dist.get_rank() == 1 and trainer.step == 4:
            trainer.model.norm.weight.detach().to_local().fill_(float("nan"))

    trainer.optimizers.step = step
    try:
        trainer.train()
    except NonFiniteError as caught:
        return str(caught)
    finally:
        trainer.close()
    return "nothing"


def test_weights_that_are_not_finite_on_one_rank_are_saved_by_none(gloo_pool, source, tmp_path):
    errors = gloo_pool(2).run(poison_a_weight_of_rank_one, source, tmp_path / "run", 2)
    for error in errors:
        assert "norm.weight is not finite at step 4" in error
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2]


@pytest.mark.parametrize(
    ("steps", "updated", "message"), [([3], [1, 2, 4], ""), ([3, 4], [1, 2], "2 steps in a row")]
)
def test_a_nan_on_one_rank_is_skipped_by_all(gloo_pool, source, tmp_path, steps, updated, message):
    """And two in a row stop all, and leave the last good checkpoint."""
    results = gloo_pool(2).run(
        train_with_a_nan_on_rank_one, source, tmp_path / "run", 2, steps, timeout=90
    )
    for updates, error, finite, step in results:
        assert (updates, finite, step) == (updated, True, STEPS)
        assert message in error
        assert bool(error) == bool(message)
    assert committed_steps(tmp_path / "run" / "checkpoints") == ([2] if message else [2, 4])


class RaisesOnRankOne(Callback):
    """After the first step rank 1 fails and rank 0 waits for ever, as in a collective."""

    def on_step_end(self, trainer: LoopTrainer, metrics: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1's own")
        threading.Event().wait()


def train_with_an_error_on_rank_one(source: Path, run: Path) -> None:
    """Let what rank 1 closes wait for rank 0."""
    act_as_launched(2)
    log = (run.parent / f"rank-{dist.get_rank()}.log").open("w")
    os.dup2(log.fileno(), 2)
    sys.stderr = sys.__stderr__ = log
    config = tiny_config(source, run, steps=STEPS)
    config.callbacks = (RaisesOnRankOne(),)
    LoopTrainer.close = lambda *_, **__: threading.Event().wait()  # type: ignore[method-assign]
    with StopListener(leave=0.1) as listener:
        train_run(config, stop_listener=listener)


def test_an_error_of_one_rank_ends_it_though_its_peers_never_come(
    gloo_pool, source, tmp_path, monkeypatch
):
    monkeypatch.setattr(multiprocess, "GRACE_SECONDS", 0.1)  # rank 0 never comes
    with pytest.raises(RankError, match=r"failed on rank 1; rank 0 was left waiting") as failure:
        gloo_pool(2).run(train_with_an_error_on_rank_one, source, tmp_path / "run")
    assert failure.value.reports[1] == "the process died with exit code 1"
    log = (tmp_path / "rank-1.log").read_text().splitlines()
    assert log[-1] == "RuntimeError: rank 1's own"
    assert any("in on_step_end" in line for line in log)


CLOSED = "closed"


class SlowToClose(Callback):
    """A tracking service that takes its time on rank 0."""

    def on_train_start(self, trainer: LoopTrainer) -> None:
        if dist.get_rank() == 0:
            close = trainer.metrics_processor.close

            def slowly() -> None:
                time.sleep(0.5)
                close()
                Path(trainer.config.dump_folder, CLOSED).touch()

            trainer.metrics_processor.close = slowly


def train_and_look_for_the_others(source: Path, run: Path) -> bool:
    act_as_launched(2)
    config = tiny_config(source, run, steps=2)
    config.callbacks = (SlowToClose(),)
    train_run(config)
    return (run / CLOSED).exists()


def test_ranks_end_together(gloo_pool, source, tmp_path):
    """A launcher kills those that take much longer than the first."""
    assert all(gloo_pool(2).run(train_and_look_for_the_others, source, tmp_path / "run"))


def train_until_both_are_asked_at_work(source: Path, run: Path) -> tuple[str, int]:
    """Ask rank 1 while it validates the second step, and rank 0 while it logs that."""
    trainer = make_trainer(source, run, 2, held_out=1)
    validation = trainer.callbacks[-1]
    validate, logged = validation.on_step_end, trainer.metrics_processor.logger.log

    def ask() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while trainer.stop_listener.requested_by is None:
            time.sleep(0.01)

    def validated(trainer: LoopTrainer, record: Any) -> None:
        if dist.get_rank() == 1 and trainer.step == 2:
            ask()
        validate(trainer, record)

    def uploaded(*arguments: Any) -> None:
        if dist.get_rank() == 0 and trainer.step == 2 and not trainer.stop_listener.requested_by:
            ask()
        logged(*arguments)

    validation.on_step_end = validated
    trainer.metrics_processor.logger.log = uploaded
    with StopListener() as trainer.stop_listener:
        try:
            trainer.train()
        except StoppedError:
            return "stopped", trainer.step
        finally:
            trainer.close()
    return "went on", trainer.step


def test_signals_during_validation_and_uploads_stop_all_ranks_at_one_boundary(
    gloo_pool, source, runs, tmp_path
):
    pool = gloo_pool(2)
    ends = pool.run(train_until_both_are_asked_at_work, source, tmp_path / "run")
    assert ends[0] == ends[1]
    assert ends[0][0] == "stopped"
    assert committed_steps(tmp_path / "run" / "checkpoints")[-1] == ends[0][1] < STEPS
    pool.run(train, source, tmp_path / "run", 2, {"held_out": 1})
    whole, stopped = records(runs["dp2"]), records(tmp_path / "run")
    assert [record["loss"] for record in stopped] == [record["loss"] for record in whole]
