"""The cases: which file is spoiled how, and which command then reads it.

A case is a number: it decides, through `random.Random`, everything that is drawn.
"""

import json
import random
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
_STEP_2 = "run/checkpoints/step-2"

# Every command writes in `out` or `run` alone.
VERBS: Mapping[str, str] = {
    "checkpoint ls": "checkpoint ls run",
    "checkpoint verify": "checkpoint verify run",
    "checkpoint diff": f"checkpoint diff {_STEP_2} {_NEWEST}",
    "checkpoint merge": f"checkpoint merge {_STEP_2} {_NEWEST} --output out/merged",
    "convert export": "convert export run --output out/export",
    "convert import": "convert import export --output out/imported",
    "data plan": f"data plan {_RECIPE}",
    "data show": "data show source",
    "data tokenize": "data tokenize raw.jsonl --output out/source --tokenizer tokenizer.json",
    "data train-tokenizer": "data train-tokenizer raw.jsonl --output out/x.json --vocab-size 280",
    "data verify": "data verify source",
    "eval": "eval run --depths 1 --windows 2",
    "generate": "generate run --prompt def --max-new-tokens 2",
    "status": "status run",
    "train": f"train {_RECIPE} --dump-folder run",
    "train a child": f"train {_RECIPE} --dump-folder out/child --training.steps 1 "
    "--checkpoint.carry.parent run",
    "train anew": f"train {_RECIPE} --dump-folder out/new --training.steps 1",
    "upcycle": "upcycle run --output out/deeper --layers 4",
}

_OF_CHECKPOINTS = (
    *(verb for verb in VERBS if verb.startswith("checkpoint")),
    *("convert export", "eval", "generate", "status", "train", "train a child", "upcycle"),
)
_OF_SOURCES = ("data plan", "data show", "data verify", "eval", "train", "train anew")


@dataclass(frozen=True, slots=True)
class Target:
    """A file that is spoiled, or one of a pattern's, with the ways to spoil it and its readers."""

    name: str
    pattern: str
    spoils: Mapping[str, Spoil]
    verbs: Sequence[str]


_IMPORT = ("convert import",)
TARGETS = (
    Target("manifest", f"{_NEWEST}/{MANIFEST}", spoiling.JSON_FILE, _OF_CHECKPOINTS),
    Target("tensors.json", f"{_NEWEST}/{TABLE}", spoiling.TABLE, _OF_CHECKPOINTS),
    Target(".metadata", f"{_NEWEST}/.metadata", spoiling.METADATA, _OF_CHECKPOINTS),
    Target("shard of a checkpoint", f"{_NEWEST}/*.distcp", spoiling.SHARD, _OF_CHECKPOINTS),
    Target("card of a source", "source/source.json", spoiling.CARD, _OF_SOURCES),
    Target("index of documents", "source/train/*.ds.index", spoiling.INDEX, _OF_SOURCES),
    Target("tokens", "source/*/*.ds", spoiling.TOKENS, _OF_SOURCES),
    Target("tokenizer of a source", "source/tokenizer.json", spoiling.JSON_FILE, _OF_SOURCES),
    Target("config.json of a folder", "export/config.json", spoiling.JSON_FILE, _IMPORT),
    Target("safetensors", "export/*.safetensors", spoiling.SAFETENSORS, _IMPORT),
    Target("index", "export/model.safetensors.index.json", spoiling.WEIGHT_INDEX, _IMPORT),
    Target("tokenizer of a folder", "export/*tok*.json", spoiling.JSON_FILE, _IMPORT),
    Target("end tokens", "export/generation_config.json", spoiling.JSON_FILE, _IMPORT),
    Target("template", "export/chat_template.jinja", spoiling.TEXT_FILE, _IMPORT),
    Target(
        "documents", "raw.jsonl", spoiling.JSON_LINES, ("data tokenize", "data train-tokenizer")
    ),
    Target("tokenizer", "tokenizer.json", spoiling.JSON_FILE, ("data tokenize",)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One spoiled file and the command that reads it; `number` is the seed of all that is drawn."""

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
        self.target.spoils[self.spoil](path, rng)
        signed = rng.random() < 0.7
        if signed:
            _sign(path)
        return path, signed


def cases(first: int, count: int) -> Iterator[Case]:
    """Yield cases: every file, spoiled in every way, comes before any comes again."""
    pairs = [(target, spoil) for target in TARGETS for spoil in target.spoils]
    random.Random(0).shuffle(pairs)
    for number in range(first, first + count):
        target, spoil = pairs[number % len(pairs)]
        turn = number // len(pairs) + sum(map(ord, target.name + spoil))
        yield Case(number, target, spoil, target.verbs[turn % len(target.verbs)])


def _sign(path: Path) -> None:
    """Make a changed file match its hashes again, as an attacker would."""
    with suppress(Exception):  # what cannot be signed stays as it is
        if path.name == "source.json":
            record = json.loads(path.read_text())
            record.pop("card_sha256", None)
            path.write_text(json.dumps({**record, "card_sha256": json_sha256(record)}))
        elif path.parent.name.startswith("step-"):
            record = json.loads((path.parent / MANIFEST).read_text())
            if path.name != MANIFEST:
                record["files"] = file_records(path.parent)
            write_manifest(path.parent, record)
