"""The cases: which file is spoiled how, and which command then reads it.

A case is a number: it decides, through `random.Random`, everything that is drawn.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.hostile import spoiling
from tests.hostile.spoiling import Spoil
from titan_loop.checkpoint.manifest import MANIFEST, TABLE, file_records, write_manifest
from titan_loop.storage.json_files import json_sha256

_RECIPE = "tests.hostile.whole:recipe"
_NEWEST = "run/checkpoints/step-4"

VERBS: Mapping[str, Sequence[str]] = {
    "analyse": (
        *("analyse", "agreement", "run", "--items", "multi_hop"),
        *("--depths", "1", "2", "--limit", "2"),
    ),
    "checkpoint ls": ("checkpoint", "ls", "run"),
    "checkpoint verify": ("checkpoint", "verify", "run"),
    "checkpoint diff": ("checkpoint", "diff", "run/checkpoints/step-2", _NEWEST),
    "checkpoint rm": ("checkpoint", "rm", _NEWEST),
    "checkpoint tag": ("checkpoint", "tag", _NEWEST, "name"),
    "checkpoint consolidate": ("checkpoint", "consolidate", _NEWEST, "--output", "out/one"),
    "checkpoint merge": (
        "checkpoint",
        "merge",
        "run/checkpoints/step-2",
        _NEWEST,
        "--output",
        "out/merged",
    ),
    "convert export": ("convert", "export", "run", "--output", "out/export"),
    "convert import": ("convert", "import", "export", "--output", "out/imported"),
    "data pack": ("data", "pack", "source", "--seq-len", "32", "--long-documents", "split"),
    "data plan": ("data", "plan", _RECIPE),
    "data show": ("data", "show", "source"),
    "data tokenize": (
        "data",
        "tokenize",
        "raw.jsonl",
        "--output",
        "out/source",
        "--tokenizer",
        "tokenizer.json",
    ),
    "data train-tokenizer": (
        "data",
        "train-tokenizer",
        "raw.jsonl",
        "--output",
        "out/x.json",
        "--vocab-size",
        "280",
    ),
    "data verify": ("data", "verify", "source"),
    "eval of own tasks": (
        *("eval", "run", "--tasks", "own", "--include-path", "tasks"),
        *("--depths", "1", "--limit", "2"),
    ),
    "eval of tasks": ("eval", "run", "--tasks", "held_out", "--windows", "2"),
    "eval": ("eval", "run", "--depths", "1", "--windows", "2"),
    "eval watch": ("eval", "watch", "run", "--once", "--depths", "1", "--windows", "2"),
    "generate": ("generate", "run", "--prompt", "def", "--max-new-tokens", "2"),
    "lm_eval": (
        *("lm_eval", "--model", "titan_loop", "--model_args", "checkpoint=run"),
        *("--include_path", "tasks", "--tasks", "own", "--limit", "2"),
    ),
    "plot": ("plot", "run"),
    "report": ("report", "run"),
    "results add": ("results", "add", "run", "--folder", "out/results", "--unclean"),
    "scaling": ("scaling", "run"),
    "slurm submit": ("slurm", "submit", _RECIPE, "--nodes", "1", "--dry-run"),
    "status": ("status", "run"),
    "train": ("train", _RECIPE, "--dump-folder", "run"),
    "train from a bucket": ("train", "tests.hostile.whole:bucket_recipe"),
    "train --config": (
        *("train", "--config", "run/config.json", "--dump-folder", "out/again"),
        *("--training.steps", "1"),
    ),
    "train a child": (
        "train",
        _RECIPE,
        "--dump-folder",
        "out/child",
        "--training.steps",
        "1",
        "--checkpoint.carry.parent",
        "run",
    ),
    "train anew": ("train", _RECIPE, "--dump-folder", "out/new", "--training.steps", "1"),
    "upcycle": ("upcycle", "run", "--output", "out/deeper", "--layers", "4"),
}

_OF_CHECKPOINTS = (
    *(verb for verb in VERBS if verb.startswith("checkpoint")),
    *("convert export", "eval", "generate", "lm_eval", "status", "train", "train a child"),
    "upcycle",
)
_OF_RUNS = (
    *("eval", "eval of tasks", "generate", "plot", "report", "status", "train", "train a child"),
    *("upcycle", "convert export", "checkpoint ls", "checkpoint merge"),
    *("analyse", "eval watch", "lm_eval", "results add", "scaling", "slurm submit"),
    "train --config",
)
_FROM_BUCKET = "train from a bucket"
_OF_SOURCES = ("data pack", "data plan", "data show", "data verify", "eval", "train", "train anew")


@dataclass(frozen=True, slots=True)
class Target:
    """A file that is spoiled, or a group of alike files of which one is drawn.

    Attributes:
        name: What it is called in the table.
        pattern: Where it is, as of `Path.glob`.
        spoils: Ways to spoil it by name.
        verbs: Commands that read it.
    """

    name: str
    pattern: str
    spoils: Mapping[str, Spoil]
    verbs: Sequence[str]


def _folder(path: Path, rng: random.Random) -> None:
    """Do to a checkpoint's folder what people do."""
    other = path.with_name(rng.choice(("step-004", "step-5", "step-٩", "copy", "damaged-step-4")))
    act = rng.randrange(5)
    if act == 0:
        path.rename(other)
    elif act == 1:
        shutil.copytree(path, other)
    else:
        path.rename(path.parents[1] / "archive")
        path.symlink_to(("../archive", path.name, "../nowhere")[act - 2])


FOLDER: Mapping[str, Spoil] = {"moved, copied or linked": _folder}

TARGETS = (
    Target("checkpoint folder", _NEWEST, FOLDER, _OF_CHECKPOINTS),
    Target("manifest", f"{_NEWEST}/{MANIFEST}", spoiling.JSON_FILE, _OF_CHECKPOINTS),
    Target(
        "older manifest",
        f"run/checkpoints/step-2/{MANIFEST}",
        spoiling.JSON_FILE,
        ("checkpoint ls", "checkpoint verify", "checkpoint diff", "train"),
    ),
    Target("tensors.json", f"{_NEWEST}/{TABLE}", spoiling.TABLE, _OF_CHECKPOINTS),
    Target(".metadata", f"{_NEWEST}/.metadata", spoiling.METADATA, _OF_CHECKPOINTS),
    Target("shard of a checkpoint", f"{_NEWEST}/*.distcp", spoiling.SHARD, _OF_CHECKPOINTS),
    Target(
        "tags",
        "run/checkpoints/step-2/tags.json",
        spoiling.JSON_FILE,
        ("checkpoint ls", "checkpoint tag", "checkpoint rm", "train"),
    ),
    Target("config.json of a run", "run/config.json", spoiling.JSON_FILE, _OF_RUNS),
    Target("run.json", "run/run.json", spoiling.JSON_FILE, _OF_RUNS),
    Target(
        "metrics",
        "run/metrics.jsonl",
        spoiling.RUN_LINES,
        ("plot", "report", "status", "train", "results add", "scaling"),
    ),
    Target("norms", "run/norms.jsonl", spoiling.RUN_LINES, ("report", "train")),
    Target("decisions", "run/decisions.jsonl", spoiling.RUN_LINES, ("report", "status", "train")),
    Target("heartbeat", "run/heartbeats/rank-0.json", spoiling.JSON_FILE, ("status", "train")),
    Target(
        "evaluations",
        "run/evals.jsonl",
        spoiling.RUN_LINES,
        ("plot", "report", "train", "eval watch"),
    ),
    Target(
        "report of depths",
        "run/evals/depth*.json",
        spoiling.JSON_FILE,
        ("plot", "report", "results add"),
    ),
    Target("card of a source", "source/source.json", spoiling.JSON_FILE, _OF_SOURCES),
    Target("card in a bucket", "source/source.json", spoiling.CARD, (_FROM_BUCKET,)),
    Target("keys of a bucket", "source/source.json", spoiling.BUCKET, (_FROM_BUCKET,)),
    Target("index of documents", "source/train/*.ds.index", spoiling.INDEX, _OF_SOURCES),
    Target(
        "packed index",
        "source/train/packed_64.*",
        spoiling.INDEX,
        ("data verify", "data pack", "data show", "train"),
    ),
    Target("tokens", "source/train/*.ds", spoiling.TOKENS, _OF_SOURCES),
    Target("held-out tokens", "source/held_out/*.ds", spoiling.TOKENS, (*_OF_SOURCES, "eval")),
    Target("held-out index", "source/held_out/*.index", spoiling.INDEX, ("eval", "train")),
    Target(
        "tokenizer of a source",
        "source/tokenizer.json",
        spoiling.JSON_FILE,
        (*_OF_SOURCES, "generate", "convert export", "lm_eval"),
    ),
    Target(
        "config.json of a folder", "export/config.json", spoiling.JSON_FILE, ("convert import",)
    ),
    Target("safetensors", "export/*.safetensors", spoiling.SAFETENSORS, ("convert import",)),
    Target(
        "index of safetensors",
        "export/model.safetensors.index.json",
        spoiling.WEIGHT_INDEX,
        ("convert import",),
    ),
    Target(
        "tokenizer of a folder",
        "export/tokenizer*.json",
        spoiling.JSON_FILE,
        ("convert import",),
    ),
    Target(
        "end tokens of a folder",
        "export/generation_config.json",
        spoiling.JSON_FILE,
        ("convert import",),
    ),
    Target("template", "export/chat_template.jinja", spoiling.TEXT_FILE, ("convert import",)),
    Target(
        "documents",
        "raw.jsonl",
        spoiling.JSON_LINES,
        ("data tokenize", "data train-tokenizer"),
    ),
    Target("tokenizer", "tokenizer.json", spoiling.JSON_FILE, ("data tokenize",)),
    Target("task file", "tasks/own.yaml", spoiling.TASK_FILE, ("eval of own tasks",)),
    Target("items of a task", "tasks/items.jsonl", spoiling.ITEMS, ("eval of own tasks",)),
)

CLOSED = "closed to others"
"""What is done to every target as a user without rights: mode 000, for it or for its folder."""


@dataclass(frozen=True, slots=True)
class Case:
    """One spoiled file and the command that reads it.

    Attributes:
        number: Seed of everything that is drawn.
        target: The file.
        spoil: Name of what happens to it.
        verb: Name of the command.
    """

    number: int
    target: Target
    spoil: str
    verb: str

    @property
    def name(self) -> str:
        """How a message names it."""
        return f"case {self.number}: {self.target.name}, {self.spoil}, {self.verb}"

    def prepare(self, folder: Path) -> tuple[Path, bool]:
        """Spoil the file in a copy of everything; return it, and whether its hashes match again."""
        rng = random.Random(self.number)
        path = rng.choice(sorted(folder.glob(self.target.pattern)))
        if self.spoil == CLOSED:
            for each in [folder, *folder.rglob("*")]:
                os.chown(each, 65_534, 65_534, follow_symlinks=False)
            closed = (path, path.parent) if path.parent != folder else (path,)
            rng.choice(closed).chmod(0)
            return path, False
        self.target.spoils[self.spoil](path, rng)
        signed = rng.random() < 0.7
        if signed:
            _sign(path)
        return path, signed


def cases(first: int, count: int) -> Iterator[Case]:
    """Yield cases: every file, spoiled in every way, comes before any comes again."""
    pairs = [(target, spoil) for target in TARGETS for spoil in (*target.spoils, CLOSED)]
    random.Random(0).shuffle(pairs)
    for number in range(first, first + count):
        target, spoil = pairs[number % len(pairs)]
        turn = number // len(pairs) + sum(map(ord, target.name + spoil))
        yield Case(number, target, spoil, target.verbs[turn % len(target.verbs)])


def _sign(path: Path) -> None:
    """Make a changed file match its hashes again, as an attacker would."""
    with suppress(Exception):  # what cannot be signed stays as it is
        if not path.is_file() or path.stat().st_size > 1 << 26:
            return
        if path.name == "source.json":
            record = json.loads(path.read_text())
            record.pop("card_sha256", None)
            spoiling.write_odd_json(path, {**record, "card_sha256": json_sha256(record)})
        elif path.parent.name.startswith("step-") and not path.is_symlink():
            record = json.loads((path.parent / MANIFEST).read_text())
            if path.name != MANIFEST:
                record["files"] = file_records(path.parent)
            write_manifest(path.parent, record)
