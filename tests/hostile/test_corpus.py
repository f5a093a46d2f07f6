"""Commands on spoiled files: a case is a number, and README.md says what must not happen.

`TITAN_LOOP_HOSTILE_CASES=FIRST:COUNT` chooses the cases. Each runs in a forked child, so this
process must have no threads, which workers of pytest-xdist have.
"""

import hashlib
import importlib
import json
import os
import pkgutil
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import titan_loop
from tests.hostile import spoiling, whole
from tests.hostile.forked import run_forked
from titan_loop.checkpoint.manifest import MANIFEST, TABLE, file_records, write_manifest
from titan_loop.cli.main import main
from titan_loop.storage.json_files import json_sha256

pytestmark = pytest.mark.hostile

FIRST, COUNT = map(int, os.environ.get("TITAN_LOOP_HOSTILE_CASES", "0:300").split(":"))
RECIPE = "tests.hostile.whole:recipe"
STEP_2, NEWEST = "run/checkpoints/step-2", "run/checkpoints/step-4"

# Every command writes in `out` or `run` alone.
OF_RUNS = (
    "checkpoint ls run",
    "checkpoint verify run",
    f"checkpoint diff {STEP_2} {NEWEST}",
    f"checkpoint merge {STEP_2} {NEWEST} --output out/merged",
    "convert export run --output out/export",
    "generate run --prompt def --max-new-tokens 2",
    "status run",
    f"train {RECIPE} --dump-folder out/child --training.steps 1 --checkpoint.carry.parent run",
    "upcycle run --output out/deeper --layers 4",
)
OF_SOURCES = (
    f"data plan {RECIPE}",
    "data show source",
    "data verify source",
    f"train {RECIPE} --dump-folder out/new --training.steps 1",
)
EVAL, TRAIN = "eval run --depths 1 --windows 2", f"train {RECIPE} --dump-folder run"
IMPORT = ("convert import export --output out/imported",)
TOKENIZE = "data tokenize raw.jsonl --output out/source --tokenizer tokenizer.json"
TRAIN_TOKENIZER = "data train-tokenizer raw.jsonl --output out/x.json --vocab-size 280"

# Pattern of a file, or of one of several → the ways to spoil it, and the commands that read it.
_RUN, _SOURCE = (*OF_RUNS, EVAL, TRAIN), (*OF_SOURCES, EVAL, TRAIN)
TARGETS: Mapping[str, tuple[Mapping[str, spoiling.Spoil], tuple[str, ...]]] = {
    f"{NEWEST}/{MANIFEST}": (spoiling.JSON_FILE, _RUN),
    f"{NEWEST}/{TABLE}": (spoiling.TABLE, _RUN),
    f"{NEWEST}/.metadata": (spoiling.METADATA, _RUN),
    f"{NEWEST}/*.distcp": (spoiling.SHARD, _RUN),
    "source/source.json": (spoiling.CARD, _SOURCE),
    "source/train/*.ds.index": (spoiling.INDEX, _SOURCE),
    "source/*/*.ds": (spoiling.TOKENS, _SOURCE),
    "source/tokenizer.json": (spoiling.JSON_FILE, _SOURCE),
    "export/config.json": (spoiling.JSON_FILE, IMPORT),
    "export/*.safetensors": (spoiling.SAFETENSORS, IMPORT),
    "export/model.safetensors.index.json": (spoiling.WEIGHT_INDEX, IMPORT),
    "export/*tok*.json": (spoiling.JSON_FILE, IMPORT),
    "export/generation_config.json": (spoiling.JSON_FILE, IMPORT),
    "export/chat_template.jinja": (spoiling.TEXT_FILE, IMPORT),
    "raw.jsonl": (spoiling.JSON_FILE, (TOKENIZE, TRAIN_TOKENIZER)),
    "tokenizer.json": (spoiling.JSON_FILE, (TOKENIZE,)),
}


class Case(NamedTuple):
    """One spoiled file and the command that reads it; `number` is the seed of all that is drawn."""

    number: int
    pattern: str
    spoil: str
    command: str


def cases(first: int, count: int) -> Iterator[Case]:
    """Yield cases: every file, spoiled in every way, comes before any comes again."""
    pairs = [(pattern, spoil) for pattern, (spoils, _) in TARGETS.items() for spoil in spoils]
    random.Random(0).shuffle(pairs)
    for number in range(first, first + count):
        pattern, spoil = pairs[number % len(pairs)]
        commands = TARGETS[pattern][1]
        turn = number // len(pairs) + sum(map(ord, pattern + spoil))
        yield Case(number, pattern, spoil, commands[turn % len(commands)])


def sign(path: Path) -> None:
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


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole things of every kind, made in a child; this process only imports what children need."""
    for module in pkgutil.walk_packages(titan_loop.__path__, "titan_loop."):
        # Code of exported folders imports packages that are not here, and so do the graphs of ONNX.
        if not any(part in module.name for part in ("remote_code", "onnx", "__main__")):
            importlib.import_module(module.name)
    importlib.import_module("tokenizers")
    folder = tmp_path_factory.mktemp("things")
    fault, code, output = run_forked(lambda: whole.build(folder), folder.with_suffix(".log"))
    assert (fault, code) == ("", 0), output
    return folder


@pytest.mark.parametrize("case", [*cases(FIRST, COUNT)], ids=lambda case: " ".join(map(str, case)))
def test_a_spoiled_file_is_refused_or_read_rightly(
    case: Case, things: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, marker, rng = tmp_path / "case", tmp_path / "executed", random.Random(case.number)
    shutil.copytree(things, folder, symlinks=True, ignore=shutil.ignore_patterns("finished"))
    (folder / "out").mkdir()
    monkeypatch.setenv(spoiling.MARKER_VARIABLE, str(marker))
    path = rng.choice(sorted(folder.glob(case.pattern)))
    TARGETS[case.pattern][0][case.spoil](path, rng)
    signed = rng.random() < 0.7
    if signed:
        sign(path)
    before = contents(folder)

    def act() -> int:
        os.chdir(folder)
        torch.set_num_threads(1)
        return main(case.command.split())

    fault, code, output = run_forked(act, tmp_path / "log")
    assert not fault, f"{fault}\n{output}"
    assert not marker.exists(), "code in the file was executed"
    assert contents(folder) == before
    # Spoiled data, or weights that somebody signed, are trained as they are.
    differs = case.pattern.startswith("source/") or (signed and "distcp" in case.pattern)
    if case.command == TRAIN and code == 0 and not differs:
        last, right = (last_record(run) for run in (folder / "run", things / "finished"))
        for name in ("step", "loss", "data_hash"):
            assert last[name] == right[name], name


def last_record(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_bytes().splitlines()[-1])


def contents(folder: Path) -> dict[str, str]:
    """Return a hash of every file that no command may change, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in ("out", "run")
    }
