"""One preparation: its inputs, its settings and its folder, which may hold finished tasks."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from titan_loop import __version__
from titan_loop.data.prepare.chat_records import ChatRecords
from titan_loop.data.prepare.config import PrepareConfig
from titan_loop.data.prepare.documents import Documents
from titan_loop.data.source_card import CARD_NAME, LOCK_NAME, file_sha256
from titan_loop.errors import UserError
from titan_loop.storage.json_files import read_json_object, write_json
from titan_loop.text.tokenizer import TOKENIZER_NAME

SPLITS = ("train", "held_out")
SETTINGS_NAME = "preparation.json"
_MODIFIED = "modified_ns"
_FOLDERS = (*SPLITS, "logs", "work")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """The resolved arguments of `tokenize_source`; it is pickled into SLURM jobs."""

    output: Path
    documents: Documents
    config: PrepareConfig
    held_out_fraction: float
    eos_token: str
    bos_token: str | None
    text_key: str
    chat: ChatRecords | None
    tasks: int
    max_malformed: float
    licence: str
    command: str

    @property
    def work(self) -> Path:
        """The folder of intermediate files, removed at the end."""
        return self.output / "work"

    def logs(self, pipeline: str) -> Path:
        """Return datatrove's folder for one pipeline."""
        return self.output / "logs" / pipeline

    @property
    def holds_out(self) -> bool:
        """Whether there is a held-out split."""
        return bool(self.documents.held_out_files) or self.held_out_fraction > 0

    def versions(self) -> dict[str, str]:
        """Return the versions of the tools that the stored tokens depend on."""
        names = ["datatrove", "tokenizers", "numpy"]
        names += ["spacy"] if self.config.cleaning() else []
        names += ["lm_eval"] if self.config.decontaminate else []
        try:
            return {"titan_loop": __version__, **{name: version(name) for name in names}}
        except PackageNotFoundError as error:
            problem = f"cleaning needs {error.name}, which is not installed"
            raise UserError(f"{problem}: pip install 'titan-loop[clean]'") from error


def _is_source(output: Path) -> bool:
    return (output / CARD_NAME).exists() or (output / SETTINGS_NAME).exists()


def written_by_us(output: Path) -> list[Path]:
    """Return the files that a preparation writes, to skip them in an input folder."""
    names = [LOCK_NAME]
    if _is_source(output):
        names += [*_FOLDERS, CARD_NAME, SETTINGS_NAME, TOKENIZER_NAME]
    return [output / name for name in names]


def refuse_output(output: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a complete source, or files of another origin."""
    if (output / CARD_NAME).exists() and not overwrite:
        raise UserError(f"source {output} exists already: give another output or pass --overwrite")
    for name in _FOLDERS:
        if (output / name).exists() and not _is_source(output):
            problem = f"output {output} holds a {name!r} that is not a source's"
            raise UserError(f"{problem}: give another output")


def start(preparation: Preparation, tokenizer_path: Path, overwrite: bool) -> None:
    """Make the output ready: empty, or with the tasks finished earlier under the same settings."""
    output = preparation.output
    settings = _settings(preparation, tokenizer_path)
    tokenizer = tokenizer_path.read_bytes()  # it may lie in the folder removed below
    refuse_output(output, overwrite)  # it may have been finished meanwhile
    unfinished, anew = output / SETTINGS_NAME, overwrite
    if unfinished.exists() and not overwrite:
        known = read_json_object(unfinished, fix="pass --overwrite to begin anew")
        changed = [name for name in settings if settings[name] != known.get(name)]
        changed = [name for name in changed if name != _MODIFIED]
        kept = (path for split in SPLITS for path in (output / split).glob("*.ds"))
        anew = bool(changed) and not any(path.stat().st_size for path in kept)  # nothing is lost
        if changed and not anew:
            raise UserError(
                f"source {output} is unfinished with other settings ({', '.join(changed)}): give "
                "those again to go on from there, or pass --overwrite to begin anew"
            )
        if not changed:
            _refuse_modified(preparation, known[_MODIFIED], settings[_MODIFIED])
    if anew and _is_source(output):
        (output / CARD_NAME).unlink(missing_ok=True)  # first: the card marks it as complete
        for name in _FOLDERS:
            shutil.rmtree(output / name, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
    (output / TOKENIZER_NAME).write_bytes(tokenizer)
    write_json(unfinished, settings)


def _refuse_modified(preparation: Preparation, known: Sequence[int], found: Sequence[int]) -> None:
    """Refuse inputs modified after a finished task read them; the other tasks read them again."""
    files = preparation.documents.all_files()
    for number, ((path, _), before, now) in enumerate(zip(files, known, found, strict=True)):
        task = number % preparation.tasks  # datatrove deals the files out to the tasks
        if before != now and any((preparation.output / "logs").glob(f"*/completions/{task:05d}")):
            raise UserError(
                f"input {path} was modified after source {preparation.output} had read it: pass "
                "--overwrite to begin anew"
            )


def _settings(preparation: Preparation, tokenizer_path: Path) -> dict[str, Any]:
    files = [Path(file.path).stat() for file in preparation.documents.all_files()]
    names = ("held_out_fraction", "eos_token", "bos_token", "text_key", "tasks")
    settings = {
        "documents": preparation.documents._asdict(),
        "bytes": [file.st_size for file in files],
        _MODIFIED: [file.st_mtime_ns for file in files],
        "tokenizer": file_sha256(tokenizer_path),
        "cleaning": preparation.config.cleaning(),
        **{name: getattr(preparation, name) for name in names},
        "chat": None if preparation.chat is None else preparation.chat.settings(),
        "versions": preparation.versions(),
    }
    return json.loads(json.dumps(settings))  # as the file gives them back: without tuples
