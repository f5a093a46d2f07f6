"""The documented torchrun line: four ranks, TP 2 × FSDP 2, through the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_loop.checkpoint.retention import committed_steps
from titan_loop.testing.tiny import SEQ_LEN, tiny_source
from titan_loop.training.run_directory import RunDirectory

pytestmark = pytest.mark.multiprocess


def _torchrun(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "-m", "titan_loop", "train", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.getenv("PYTHONPATH")]))
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_four_ranks_train_the_quick_start_recipe(tmp_path):
    source = tiny_source(tmp_path)
    flags = (
        "--dataloader.mixture", f"{source}=1", "--training.seq-len", str(SEQ_LEN),
        "--batch.global-batch-tokens", str(4 * SEQ_LEN), "--total-tokens", str(12 * SEQ_LEN),
        "--held-out.interval", "3", "--held-out.windows", "3",
        "--parallelism.tensor-parallel-degree", "2", "--training.local-batch-size", "2",
        "--dump-folder", "run",
    )  # fmt: skip
    result = _torchrun(tmp_path, 4, "quickstart", *flags)
    assert result.returncode == 0, result.stderr[-3000:]
    run = RunDirectory(tmp_path / "run")
    assert [record["step"] for record in run.read_metrics()] == [1, 3]
    assert committed_steps(run.checkpoints) == [3]
    assert list(run.tensorboard.glob("events.*"))

    # A mistake ends every rank at once, with one line and without a traceback.
    result = _torchrun(tmp_path, 4, "quickstart", *flags, "--model.n-heads", "3")
    assert result.returncode != 0
    assert "titan-loop: error: model.n_heads=3" in result.stderr


def test_two_ranks_train_every_run_of_a_recipe_in_one_process_group(tmp_path):
    result = _torchrun(
        tmp_path, 2, "depth_demo", "--total-tokens", "4096", "--training.local-batch-size", "8"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for name in ("looped", "not_looped"):
        run = RunDirectory(tmp_path / "runs" / "depth_demo" / name)
        assert [record["step"] for record in run.read_metrics()] == [1, 4]
        assert len(run.evals_jsonl.read_text().splitlines()) == 1
