"""The exam during a real run: every depth is graded, and the answers are the right ones."""

import pytest
import torch.distributed as dist

from titan_loop.data.synthetic.mano_loader import ManoLoader
from titan_loop.evaluation.mano_exam import ManoExam
from titan_loop.models.sizes import ModelOptions
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.run import run_training, shutdown
from titan_loop.training.run_directory import read_jsonl
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

SEQ_LEN = 32


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    shutdown()
    assert not dist.is_initialized()


def test_every_depth_is_graded_on_schedule(tmp_path):
    config = LoopTrainer.Config(
        dump_folder=str(tmp_path / "run"),
        total_tokens=60 * 16 * SEQ_LEN,
        model=ModelOptions(size="debugmodel", n_layers=1),
        dataloader=ManoLoader.Config(modulus=3, max_operations=2),
        learning_rate=Schedule.constant(5e-3),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(16 * SEQ_LEN)),
        callbacks=(ManoExam(depths=(1, 4, 6), interval=30, questions=64),),
    )
    config.training.seq_len = SEQ_LEN
    config.training.local_batch_size = 16
    config.checkpoint.enable = False
    run_training(config, command=["test"])
    records = read_jsonl(tmp_path / "run" / "evals" / "mano.jsonl")
    assert [record["step"] for record in records] == [30, 60]
    for record in records:
        for depth in (1, 4, 6):
            assert 0 <= record[f"accuracy/step_{depth}"] <= 1
