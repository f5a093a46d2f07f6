"""A start with other settings than the last one says so; some of them need consent."""

import math
import os
import shutil
from pathlib import Path

import pytest

from tests.support.tiny import BATCH_TOKENS, tiny_config, train_run
from titan_loop.recipes.start import shutdown
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def begun(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped by a limit of steps."""
    config = started(source, tmp_path_factory.mktemp("begun") / "run")
    config.training.steps = 2
    environment = dict(os.environ)
    train_run(config)
    shutdown()
    os.environ.clear()
    os.environ.update(environment)
    return Path(config.dump_folder)


def started(source: Path, folder: Path) -> LoopTrainer.Config:
    config = tiny_config(source, folder, steps=4)
    config.training.max_norm = math.inf  # null in JSON, and no change
    return config


@pytest.fixture
def config(source: Path, begun: Path, tmp_path: Path) -> LoopTrainer.Config:
    """The run's config without that limit, in a copy of the run."""
    shutil.copytree(begun, tmp_path / "run")
    return started(source, tmp_path / "run")


def test_one_line_a_field(
    config: LoopTrainer.Config,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    # It would take caplog's handler away.
    monkeypatch.setattr("titan_loop.compat.start_logging", lambda rank: None)
    config.learning_rate = Schedule.parse("0:0 linear 1K:1e-3")
    config.recurrence = RecurrenceConfig(steps=Schedule.constant(3))
    config.batch.global_batch_tokens = Schedule.constant(BATCH_TOKENS // 2)
    config.debug.seed = 7
    train_run(config)
    lines = [
        record.getMessage() for record in caplog.records if "last start" in record.getMessage()
    ]
    changed = {line.split()[5]: line.split(maxsplit=6)[6] for line in lines}
    assert changed.pop("training.steps") == "2 → 0"
    assert changed.pop("debug.seed") == "0 → 7"
    assert changed.pop("learning_rate").endswith("→ '0:0 linear 1K:0.001'")
    assert changed.pop("recurrence.steps") == "'0:4 constant 512:2' → '3'"
    assert changed.pop("batch.global_batch_tokens") == "'256' → '128'"
    assert not changed
    caplog.clear()
    config.total_tokens += 4 * BATCH_TOKENS
    train_run(config)
    lines = [
        record.getMessage() for record in caplog.records if "last start:" in record.getMessage()
    ]
    assert [line.split()[5] for line in lines] == ["total_tokens"]
