"""Executors: locally for real, SLURM by the scripts it would submit."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from titan_loop.data.prepare.document_tokenizer import PlainTextTokenizer
from titan_loop.data.prepare.executors import Pipeline, run_pipelines, slurm_chain
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.source_card import CARD_NAME, SourceCard
from titan_loop.errors import UserError

TEXTS = [f"document number {n}" for n in range(12)]


@pytest.fixture
def files(tmp_path) -> list[Path]:
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(paths):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[number::3]]
        path.write_text("".join(lines))
    return paths


def prepare(files: list[Path], out: Path, tokenizer: Path, **options: Any) -> SourceCard | None:
    return tokenize_source(
        files, output=out, tokenizer=tokenizer, tasks=3, held_out_fraction=0.3, **options
    )


def test_slurm_scripts(tmp_path):
    step = PlainTextTokenizer(str(tmp_path / "x"), "tokenizer.json", eos_token="<|endoftext|>")
    pipelines = [
        Pipeline(name=name, steps={"tokenize": step}, tasks=tasks, logs=tmp_path / name)
        for name, tasks in {"train": 7, "held_out": 3}.items()
    ]
    options = {"partition": "cpu", "time": "02:00:00", "mem_per_cpu_gb": 4, "qos": "low"}
    options["env_command"] = "source /opt/activate"
    chain: list[Any] = slurm_chain(pipelines, 2, options)
    train = chain[0]
    assert [each.depends for each in chain] == [None, train]
    script = train.get_launch_file_contents(train.get_sbatch_args(7), "launch_pickled_pipeline x")
    assert {
        "#SBATCH --partition=cpu",
        "#SBATCH --time=02:00:00",
        "#SBATCH --array=0-6%2",
        "#SBATCH --mem-per-cpu=4G",
        "#SBATCH --qos=low",
        "#SBATCH --kill-on-invalid-dep=yes",
        "source /opt/activate",
    } <= {*script.splitlines()}
    with pytest.raises(UserError, match=r"needs slurm\.time in the config"):
        slurm_chain(pipelines, 1, {"partition": "cpu"})
    with pytest.raises(UserError, match=r"slurm .*=partitio is unknown; nearest: partition"):
        slurm_chain(pipelines, 1, options | {"partitio": "cpu"})


def test_slurm_submits_a_chain_that_ends_in_the_card(files, small_tokenizer, tmp_path, monkeypatch):
    """`sbatch` is a script that writes down what it was given; the jobs are then run by hand."""
    folder = tmp_path / "bin"
    folder.mkdir()
    sbatch = folder / "sbatch"
    sbatch.write_text(
        '#!/bin/sh\nn=$(ls "$0".* 2>/dev/null | wc -l)\n'
        'for last; do :; done\n{ echo "# $@"; cat "$last"; } > "$0.$n"\necho Submitted job 10$n\n'
    )
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    config = tmp_path / "prepare.toml"
    config.write_text('[slurm]\npartition = "cpu"\ntime = "1:00:00"\n')
    options: dict[str, Any] = {"executor": "slurm", "workers": 2, "config": config}
    out = tmp_path / "out"
    with monkeypatch.context() as context:
        context.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match="'slurm' needs sbatch on the PATH"):
            prepare(files, out, small_tokenizer, **options)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert prepare(files, out, small_tokenizer, **options) is None
    assert not (out / CARD_NAME).exists()
    scripts = [path.read_text() for path in sorted(folder.glob("sbatch.*"))]
    # Each stage is followed by datatrove's own job that merges statistics.
    names = [script.split("--job-name=")[1].splitlines()[0] for script in scripts]
    assert names[::2] == ["titan-loop-train", "titan-loop-held_out", "titan-loop-card"]
    assert names[1::2] == names[::2]
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
    for name in ("scontrol", "squeue"):
        (folder / name).write_text("#!/bin/sh\necho localhost\n")
        (folder / name).chmod(sbatch.stat().st_mode)
    for task in range(3):
        run("train", task)
    run("held_out", 1)
    with pytest.raises(UserError, match="held_out: 2 of 3 tasks are unfinished, the first is 0"):
        run("card", 0)
    assert not (out / CARD_NAME).exists()
    # While one of its jobs is there, nothing of the preparation may be touched.
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    (folder / "squeue").write_text("#!/bin/sh\nprintf '7\\n103\\n103\\n'\n")
    for again in (options, {"overwrite": True}, options | {"overwrite": True}):
        with pytest.raises(UserError, match=r"prepared by SLURM jobs 103: .* with scancel 103$"):
            prepare(files, out, small_tokenizer, **again)
    (folder / "squeue").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"jobs 100, 101, .*, and squeue failed \(no controller"):
        prepare(files, out, small_tokenizer, **options)
    with monkeypatch.context() as context:
        context.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match=r"squeue failed .* works, or delete .*jobs\.txt if th"):
            prepare(files, out, small_tokenizer, **options)
    (folder / "squeue").write_text("#!/bin/sh\necho 7\n")
    assert prepare(files, out, small_tokenizer, **options) is None
    scripts = sorted(folder.glob("sbatch.*"), key=lambda path: int(path.suffix[1:]))
    assert "#SBATCH --array=0-1%2" in scripts[6].read_text()  # the unfinished ones of held_out
    for stage, tasks in {"held_out": 2, "card": 1}.items():
        for task in range(tasks):
            run(stage, task)
    local = prepare(files, tmp_path / "local", small_tokenizer)
    assert SourceCard.read(out).splits == local.splits


def die(once: Path | None, data: object, task: int, tasks: int) -> None:
    """Kill the process of task 2 as the system does when memory runs out."""
    if task == 2 and not (once and once.exists()):
        if once:
            once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed(tmp_path, caplog):
    """datatrove's pool waits for ever for the task of a worker that is gone."""

    def stage(name: str, once: Path | None) -> Pipeline:
        return Pipeline(name=name, steps={"die": partial(die, once)}, tasks=4, logs=tmp_path / name)

    assert run_pipelines([stage("once", tmp_path / "died")], "local", 2, {})
    said = r"once: a worker .* killed .*; begun and not finished: (\d, )?2(, 3)? of 4 tasks"
    assert re.search(said, caplog.text)
    with pytest.raises(UserError, match=r"always: a worker .* 2.* of 4 tasks; give fewer --work"):
        run_pipelines([stage("always", None)], "local", 2, {})
    left = stage("always", None).unfinished()
    assert 2 in left
    assert run_pipelines([stage("always", tmp_path / "died")], "local", 2, {})


def wait_for_ever(folder: Path, data: object, task: int, tasks: int) -> None:
    (folder / str(os.getpid())).touch()
    while True:
        time.sleep(1)


def test_workers_end_with_their_parent(tmp_path):
    """Or they would write into the shards of the next start."""
    pids = tmp_path / "pids"
    pids.mkdir()
    command = (
        "import sys; from pathlib import Path; from functools import partial\n"
        "from tests.data.prepare.test_executors import Pipeline, run_pipelines, wait_for_ever\n"
        "if __name__ == '__main__':\n"
        "  steps = {'wait': partial(wait_for_ever, Path(sys.argv[1]))}\n"
        "  logs = Path(sys.argv[1]) / 'logs'\n"
        "  run_pipelines([Pipeline(name='x', steps=steps, tasks=2, logs=logs)], 'local', 2, {})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", command, str(pids)])
    while len(workers := [path.name for path in pids.glob("[0-9]*")]) < 2:
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    while any(is_running(worker) for worker in workers):
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False
