"""Whole things to spoil: a run, its source, an export, documents, made by the package itself."""

import json
import os
from pathlib import Path

from titan_loop.training.trainer import LoopTrainer

STEPS, SAVED = 6, 4
"""Steps of a whole training, and those of the run that is spoiled."""

DECISIONS = [
    {"step": 2, "decision": "skip", "rewound": 0, "windows": [[8, 16]], "loss": 9.0, "began": ""},
    {"step": 2, "decision": "rewind", "rewound": 0, "windows": [[8, 16]], "to_step": 1},
]
"""What a run decided about spikes; this one had none."""

TASK = """\
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
"""A task of lm-evaluation-harness with items of one's own."""

ITEMS = [
    {"question": "one, two,", "choices": [" three", " nine"], "answer": 0},
    {"question": "red, green,", "choices": [" ten", " blue"], "answer": 1},
]


def recipe() -> LoopTrainer.Config:
    """Return the run of the folder that the process is in, which `titan-loop train` continues."""
    from tests.support.tiny import tiny_config

    config = tiny_config(Path("source"), Path("run"), steps=STEPS)
    config.held_out.interval = 2
    config.held_out.windows = 2
    config.stability.norms_interval = 2
    config.stability.skip_spikes = True
    config.checkpoint.keep_latest_k = 0  # a rewind must find one from before the spikes
    return config


def bucket_recipe() -> LoopTrainer.Config:
    """Return a run on the source in an object store, beside objects that `bucket.json` names."""
    import fsspec

    from titan_loop.data.remote_source import CACHE_VARIABLE

    os.environ[CACHE_VARIABLE] = "out/cache"
    bucket = fsspec.filesystem("memory")
    bucket.put("source", "/bucket/source", recursive=True)
    if Path("bucket.json").exists():
        for key in json.loads(Path("bucket.json").read_text()):
            bucket.store[f"/bucket/source/{key}"] = bucket.store["/bucket/source/source.json"]
    config = recipe()
    config.dump_folder = "out/run"
    config.dataloader.mixture = ["memory://bucket/source=1"]
    config.training.steps = 1
    return config


def build(folder: Path) -> None:
    """Write a whole thing of every kind into a folder; in a process of its own."""
    from tests.support.tiny import tiny_source
    from titan_loop.cli.main import main
    from titan_loop.runs.heartbeats import Heartbeat, write_heartbeat

    def run(*arguments: object) -> None:
        assert main([*map(str, arguments)]) == 0, arguments

    os.chdir(folder)
    tiny_source(folder, documents=30)
    records = [json.loads(line) for line in Path("raw.jsonl").read_text().splitlines()]
    short = [{**record, "text": record["text"][:2000]} for record in records]
    Path("raw.jsonl").write_text("".join(json.dumps(record) + "\n" for record in short))
    run("data", "pack", "source", "--seq-len", 64, "--long-documents", "split")
    train = ("train", "tests.hostile.whole:recipe", "--dump-folder")
    run(*train, "finished")
    run(*train, "run", "--training.steps", SAVED)
    run("checkpoint", "tag", "run/checkpoints/step-2", "paper")
    run("eval", "run", "--depths", 1, 2, "--windows", 2)
    run("convert", "export", "run", "--output", "export", "--chatml", "--max-shard-gigabytes", 1e-4)
    decisions = Path("run/decisions.jsonl")
    decisions.write_text("".join(json.dumps(decision) + "\n" for decision in DECISIONS))
    times = {"progress": 1e9, "written": 1e9, "seconds": 30.0}
    where = {"host": "node", "pid": 1, "step": 4, "phase": "update", "collective": ""}
    write_heartbeat(Path("run"), Heartbeat(rank=0, **where, **times))
    Path("tasks").mkdir()
    Path("tasks/own.yaml").write_text(TASK)
    Path("tasks/items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
