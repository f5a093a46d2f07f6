"""Whole things to spoil: a run, its source, an export, documents, made by the package itself."""

import json
import os
from pathlib import Path

from titan_loop.training.trainer import LoopTrainer

STEPS, SAVED = 6, 4
"""Steps of a whole training, and those of the run that is spoiled."""


def recipe() -> LoopTrainer.Config:
    """Return the run of the folder that the process is in, which `titan-loop train` continues."""
    from tests.support.tiny import tiny_config

    return tiny_config(Path("source"), Path("run"), steps=STEPS)


def build(folder: Path) -> int:
    """Write a whole thing of every kind into a folder, in a process of its own; return 0."""
    from tests.support.tiny import tiny_source
    from titan_loop.cli.main import main

    def run(*arguments: object) -> None:
        assert main([*map(str, arguments)]) == 0, arguments

    os.chdir(folder)
    tiny_source(folder, documents=30)
    records = [json.loads(line) for line in Path("raw.jsonl").read_text().splitlines()]
    short = [{**record, "text": record["text"][:2000]} for record in records]
    Path("raw.jsonl").write_text("".join(json.dumps(record) + "\n" for record in short))
    train = ("train", "tests.hostile.whole:recipe", "--dump-folder")
    run(*train, "finished")
    run(*train, "run", "--training.steps", SAVED)
    run("convert", "export", "run", "--output", "export", "--chatml", "--max-shard-gigabytes", 1e-4)
    return 0
