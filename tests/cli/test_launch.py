"""The documented torchrun line and its ranks, through the command line."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch.distributed.run

from tests.support.inner_session import become
from tests.support.multiprocess import preloaded_context
from tests.support.tiny import SEQ_LEN, act_as_launched
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR
from titan_loop.recipes import start as runner
from titan_loop.runs.run_directory import RunDirectory

pytestmark = pytest.mark.multiprocess


def _torchrun(folder: Path, ranks: int, *arguments: str) -> tuple[int | None, str]:
    """Return torchrun's exit code and output; it is forked, its ranks are new interpreters."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.getenv("PYTHONPATH")]))
    output = folder / "output.txt"
    words = ["--standalone", "--nproc-per-node", str(ranks), "-m", "titan_loop", "train"]
    torchrun = preloaded_context().Process(
        target=_be_torchrun, args=(folder, environment, output, [*words, *arguments])
    )
    torchrun.start()
    torchrun.join()
    return torchrun.exitcode, output.read_text()


def _be_torchrun(folder: Path, environment: dict[str, str], output: Path, words: list[str]) -> None:
    become(folder, environment, output)
    torch.distributed.run.main(words)


def test_ranks_of_torchrun_train_the_quick_start_recipe(source, tmp_path):
    flags = (
        "--dataloader.mixture", f"{source}=1", "--training.seq-len", str(SEQ_LEN),
        "--batch.global-batch-tokens", str(4 * SEQ_LEN), "--total-tokens", str(12 * SEQ_LEN),
        "--held-out.interval", "3", "--held-out.windows", "3",
        "--training.local-batch-size", "2", "--dump-folder", "run",
    )  # fmt: skip
    code, said = _torchrun(tmp_path, 2, "quickstart", *flags)
    assert code == 0, said[-3000:]
    run = RunDirectory(tmp_path / "run")
    assert [record["step"] for record in run.read_metrics()] == [1, 3]
    assert committed_steps(run.checkpoints) == [3]
    assert list((run.path / "tb").glob("events.*"))


def run_command(world: int, arguments: list[str]) -> tuple[int, str]:
    """Be one of a launcher's ranks; return the exit code and what went to stderr."""
    act_as_launched(world)
    leave, runner.shutdown = runner.shutdown, lambda: None  # the pool's group is not ours
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return main(arguments), stderr.getvalue()
    finally:
        runner.shutdown = leave


def test_a_mistake_ends_every_rank_with_one_line(gloo_pool, source, tmp_path):
    flags = [
        "train", "quickstart", "--dataloader.mixture", f"{source}=1", "--dump-folder",
        str(tmp_path / "run"), "--parallelism.tensor-parallel-degree", "2", "--model.n-heads", "3",
    ]  # fmt: skip
    for rank, (code, said) in enumerate(gloo_pool(2).run(run_command, 2, flags)):
        assert code == EXIT_USER_ERROR
        which = f"rank {rank}: " if rank else ""
        assert said.startswith(f"titan-loop: error: {which}parallelism.tensor_parallel_degree=2 ")
        assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
