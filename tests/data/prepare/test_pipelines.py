"""Executors: locally for real, SLURM by the scripts it would submit."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.data.shapes.shape import jsonl
from titan_loop.data.prepare.pipelines import Pipeline, run_pipelines
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.source_card import CARD_NAME, SourceCard
from titan_loop.errors import UserError


def test_slurm_submits_a_chain_that_ends_in_the_card(small_tokenizer, tmp_path, monkeypatch):
    """`sbatch` is a script that writes down what it was given; the jobs are then run by hand."""
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(files):
        path.write_bytes(jsonl([f"document number {n}" for n in range(number, 12, 3)]))
    folder, out = tmp_path / "bin", tmp_path / "out"
    folder.mkdir()

    def program(name: str, body: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{body}")
        (folder / name).chmod(0o755)

    def prepare(output: Path = out, **options: Any) -> SourceCard | None:
        options = {"tokenizer": small_tokenizer, "tasks": 3, "held_out_fraction": 0.3, **options}
        return tokenize_source(files, output=output, **options)

    program(
        "sbatch",
        'n=$(ls "$0".* 2>/dev/null | wc -l)\n'
        'for last; do :; done\n{ echo "# $@"; cat "$last"; } > "$0.$n"\necho Submitted job 10$n\n',
    )
    config = tmp_path / "prepare.toml"
    config.write_text('[slurm]\npartition = "cpu"\ntime = "1:00:00"\n')
    slurm: dict[str, Any] = {"executor": "slurm", "workers": 2, "config": config}
    with monkeypatch.context() as context:
        context.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match="'slurm' needs sbatch on the PATH"):
            prepare(**slurm)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert prepare(**slurm) is None
    scripts = [path.read_text() for path in sorted(folder.glob("sbatch.*"))]
    # Each stage is followed by datatrove's own job that merges statistics.
    names = [script.split("--job-name=")[1].splitlines()[0] for script in scripts]
    assert names[::2] == ["titan-loop-train", "titan-loop-held_out", "titan-loop-card"]
    assert "--dependency=afterok:100" in scripts[2].splitlines()[0]
    assert "--dependency=afterok:102" in scripts[4].splitlines()[0]
    assert "#SBATCH --array=0-2%2" in scripts[0]
    # What the jobs do: unpickle the executor and run it for their number.
    import dill

    def run(stage: str, task: int) -> None:
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        with (out / "logs" / stage / "executor.pik").open("rb") as file:
            executor = dill.load(file)
        executor.requeue_signals = None  # this process keeps its handlers
        executor.run()

    monkeypatch.setenv("SLURM_NODELIST", "localhost")
    program("scontrol", "echo localhost\n")
    for task in range(3):
        run("train", task)
    run("held_out", 1)
    with pytest.raises(UserError, match="held_out: 2 of 3 tasks are unfinished, the first is 0"):
        run("card", 0)
    assert not (out / CARD_NAME).exists()
    # While one of its jobs is there, nothing of the preparation may be touched.
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    program("squeue", "printf '7\\n103\\n103\\n'\n")
    for again in (slurm, {"overwrite": True}):
        with pytest.raises(UserError, match=r"prepared by SLURM jobs 103: .* with scancel 103$"):
            prepare(**again)
    program("squeue", "echo no controller >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"squeue failed \(no controller\).*delete .*s\.txt"):
        prepare(**slurm)
    program("squeue", "echo 7\n")
    assert prepare(**slurm) is None
    last = sorted(folder.glob("sbatch.*"), key=lambda path: int(path.suffix[1:]))
    assert "#SBATCH --array=0-1%2" in last[6].read_text()  # the unfinished ones of held_out
    for stage, tasks in {"held_out": 2, "card": 1}.items():
        for task in range(tasks):
            run(stage, task)
    assert SourceCard.read(out).splits == prepare(tmp_path / "local").splits


def die(once: Path, data: object, task: int, tasks: int) -> None:
    """Kill the process of task 2, once, as the system does when memory runs out."""
    if task == 2 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed(tmp_path):
    """datatrove's pool waits for ever for the task of a worker that is gone."""
    steps = {"die": partial(die, tmp_path / "died")}
    stage = Pipeline(name="stage", steps=steps, tasks=4, logs=tmp_path)
    said = r"stage: a worker .* killed .* finished: (\d, )?2(, 3)? of 4 tasks; give fewer --work"
    with pytest.raises(UserError, match=said):
        run_pipelines([stage], "local", 2, {})
    assert 2 in stage.unfinished()
    assert run_pipelines([stage], "local", 2, {})
    assert stage.unfinished() == []


def wait_for_ever(folder: Path, data: object, task: int, tasks: int) -> None:
    (folder / str(os.getpid())).touch()
    while True:
        time.sleep(1)


def test_workers_end_with_their_parent(tmp_path):
    """Or they would write into the shards of the next start."""
    command = (
        "import sys; from pathlib import Path; from functools import partial\n"
        "from tests.data.prepare.test_pipelines import Pipeline, run_pipelines, wait_for_ever\n"
        "if __name__ == '__main__':\n"
        "  steps = {'wait': partial(wait_for_ever, Path(sys.argv[1]))}\n"
        "  logs = Path(sys.argv[1]) / 'logs'\n"
        "  run_pipelines([Pipeline(name='x', steps=steps, tasks=2, logs=logs)], 'local', 2, {})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", command, str(tmp_path)])
    while len(workers := [path.name for path in tmp_path.glob("[0-9]*")]) < 2:
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    while any(is_running(worker) for worker in workers):
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return not re.search(r"\nState:\tZ", Path(f"/proc/{pid}/status").read_text())
    return False
