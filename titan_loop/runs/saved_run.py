"""A saved run to read: its model, the data it was trained on, its checkpoints and its ancestors.

`RunDirectory` names the files of a run and writes them. Readers of a run open a `SavedRun`, so that
the keys of its `config.json` are known here alone.
"""

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan_loop.checkpoint.choosing import LookAt, newest_good
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.checkpoint.keep_policy import KeepPolicy, named_checkpoint
from titan_loop.checkpoint.manifest import MANIFEST, read_manifest
from titan_loop.data.source_card import (
    CARD_NAME,
    SourceCard,
    file_sha256,
    text_format,
)
from titan_loop.errors import UserError, seen_from
from titan_loop.runs.run_directory import REPAIR, RunDirectory
from titan_loop.storage.json_files import nested
from titan_loop.text.text_format import TextFormat
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_NAME,
    load_tokenizer,
    same_ids,
    template_bos,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from titan_loop.data.load.mixture import MixtureEntry
    from titan_loop.data.tasks.task import Task
    from titan_loop.models.family import ModelOptions  # imports torchtitan, which takes seconds

logger = logging.getLogger(__name__)


class SavedCheckpoint(NamedTuple):
    """A committed checkpoint: its folder, and its manifest as read, even if the folder is gone."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.manifest["step"]

    @property
    def tokens(self) -> int:
        """Global tokens trained on."""
        return self.manifest["trainer"]["tokens"]

    @property
    def recurrent_steps(self) -> int:
        """R at the end of training so far."""
        return self.manifest["trainer"]["recurrent_steps"]


class RunTokenizer(NamedTuple):
    """A `tokenizer.json`, and whether it is known that the model was trained with it."""

    path: Path
    is_known: bool


class Ancestor(NamedTuple):
    """One run of a lineage; the last one is the run itself.

    Attributes:
        stage: Name of the stage; empty for a run outside a recipe.
        checkpoint: Checkpoint from which the next run started, or the newest one.
        manifest: Manifest of the checkpoint; None if it is gone or damaged.
    """

    run: Path
    stage: str
    checkpoint: Path
    manifest: dict[str, Any] | None


class SavedRun:
    """A run that has a `config.json`; use `open` for the path that a user gave.

    `config` is that file as it is, to copy or to show; without a `checkpoint` the newest whole one
    is read.
    """

    def __init__(
        self, path: str | os.PathLike[str], checkpoint: SavedCheckpoint | None = None
    ) -> None:
        self.directory = RunDirectory(path)
        self.path = self.directory.path
        self.config: Mapping[str, Any] = self.directory.read_config()
        self._checkpoint = checkpoint
        self.imported_tokenizer = self.path / TOKENIZER_NAME

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "SavedRun":
        """Open a run by its folder, or by one of its checkpoints, such as `best`."""
        path = named_checkpoint(Path(path))
        if not path.is_dir():
            raise UserError(
                f"checkpoint {path} is not a folder{seen_from(path)}; give a run or one of its "
                "checkpoints"
            )
        if RunDirectory(path).run_json.is_file():
            return cls(path)
        checkpoint = SavedCheckpoint(path, read_manifest(path))
        for parent in (*path.absolute().parents, *path.resolve().parents):
            if RunDirectory(parent).config_json.is_file():
                return cls(parent, checkpoint)
        raise UserError(
            f"checkpoint {path} has a {MANIFEST}, but no folder above it has the run's "
            "config.json; give a checkpoint inside its run"
        )

    @property
    def model_options(self) -> "ModelOptions":
        """Options of the model, of its family's class."""
        from titan_loop.models.family import read_options

        try:
            return read_options(self._option("model"))
        except UserError as error:
            raise UserError(f"{self.directory.config_json}: {error}") from error

    @property
    def seq_len(self) -> int:
        """Tokens L of a training window."""
        return self._option("training.seq_len")

    @property
    def total_tokens(self) -> int:
        """Global tokens that the run is to train on."""
        return self._option("total_tokens")

    @property
    def step_limit(self) -> int:
        """The option `training.steps`; 0 for none."""
        return self._option("training.steps", 0)

    # An imported or merged run has none of these three.

    @property
    def trainable(self) -> Literal["all", "exit_gate"] | None:
        """The option `trainable`."""
        return self.config.get("trainable")

    @property
    def optimizer(self) -> str:
        """The option `optimizer.name`."""
        return self._option("optimizer.name", "")

    @property
    def keep_policy(self) -> KeepPolicy:
        """The options of `checkpoint` that say which checkpoints stay."""
        options = {
            each.name: self._option(f"checkpoint.{each.name}", 0) for each in fields(KeepPolicy)
        }
        return KeepPolicy(**options)

    @property
    def parent(self) -> Path | None:
        """The option `checkpoint.carry.parent`, a run or a checkpoint; None for initial weights."""
        parent = self._option("checkpoint.carry.parent", "")
        return self.found(parent) if parent else None

    def _option(self, name: str, default: Any = None) -> Any:
        """Return the option with a dotted name; without a default it must be there."""
        value = nested(self.config, name)
        if value is None and default is None:
            raise UserError(f"{self.directory.config_json} has no {name}; {REPAIR}")
        return default if value is None else value

    @property
    def dataloader(self) -> Mapping[str, Any]:
        """The options of the loader, with the sources where they are now."""
        options = self._option("dataloader")
        if options.get("pipeline"):  # it replaces the mixture, which stays as it was given
            return options
        return {**options, "mixture": self.mixture} if "mixture" in options else options

    @property
    def mixture(self) -> list[str]:
        """The option `dataloader.mixture`, with the sources where they are now; may be empty."""
        options = self._option("dataloader")
        texts = [] if options.get("pipeline") else options.get("mixture") or []
        return [
            f"{self.found(entry.path)}{text.removeprefix(entry.path)}"
            for text, entry in zip(texts, _parsed(texts), strict=True)
        ]

    @property
    def sources(self) -> list[Path]:
        """Folders of the prepared sources, in the order of the mixture; some may be gone."""
        return [Path(entry.path) for entry in _parsed(self.mixture)]

    def found(self, path: str) -> Path:
        """Return the present place of a path that the run recorded.

        A relative path is looked for in the working directory of the run's last start, in the
        folders above the run, and in the current one.
        """
        if Path(path).is_absolute():
            return Path(path)
        known = self.directory.working_directory
        places = [known] if known is not None else []
        places += [*self.path.resolve().parents, Path.cwd()]
        there = next((place for place in places if (place / path).exists()), known or Path.cwd())
        return Path(path) if there == Path.cwd() else there / path

    def text_format(self, tokenizer: "Tokenizer") -> TextFormat:
        """Return the end-of-text token and chat format of import or sources, else the default."""
        if (recorded := self.config.get("text")) is not None:
            return TextFormat(**recorded)
        if self._named_tokenizer is not None:
            is_pipeline = self._option("dataloader", {}).get("pipeline")
            if not is_pipeline and self.parent is not None and self.parent.is_dir():
                return SavedRun.open(self.parent).text_format(tokenizer)  # may be a chat model
            bos = template_bos(tokenizer, str(self._named_tokenizer), "train with another")
            return TextFormat(
                end_of_text=self._option("dataloader.eos_token", END_OF_TEXT),
                begin_of_text=None if bos is None else tokenizer.id_to_token(bos),
            )
        cards = self._cards()
        text = text_format([*cards.values()], tokenizer) if cards else TextFormat()
        if not text.knows_chats and self.parent is not None and self.parent.is_dir():
            return text.with_chats_of(SavedRun.open(self.parent).text_format(tokenizer))
        return text

    def tokenizer(self, given: str | Path | None = None) -> RunTokenizer:
        """Return the tokenizer of the data, or a given `tokenizer.json` of the same ids."""
        cards = self._cards()
        if self.imported_tokenizer.is_file():
            own, sha256 = self.imported_tokenizer, file_sha256(self.imported_tokenizer)
        elif self._named_tokenizer is not None:
            own = self._named_tokenizer
            load_tokenizer(own)  # or one line says that it is gone
            sha256 = file_sha256(own)
        elif cards:
            source, card = next(iter(cards.items()))
            own, sha256 = source / TOKENIZER_NAME, card.tokenizer_sha256
        elif given is not None:
            return RunTokenizer(Path(given), is_known=False)
        elif (task := self.generated_task()) is not None:
            raise UserError(
                f"{self.path} was trained on examples of {task.name}, not on text: it has no "
                f"tokenizer; ask the task instead, with titan-loop eval {quote(str(self.path))} "
                f"--tasks {task.name}"
            )
        else:
            raise UserError(
                f"the data that {self.path} was trained on is not here: put it back, or give its "
                "tokenizer with --tokenizer if the command has that flag"
            )
        path = own if given is None else Path(given)
        load_tokenizer(path)
        is_own = file_sha256(path) == sha256
        if not is_own and (path == own or not same_ids(path, own) or file_sha256(own) != sha256):
            raise UserError(
                f"tokenizer {path} is not the one {self.path} was trained with; use {own}"
            )
        return RunTokenizer(path, is_known=True)

    @property
    def _named_tokenizer(self) -> Path | None:
        """The tokenizer that the config names for a pipeline, or for prompts of a file."""
        options = self._option("dataloader", {})
        task = options.get("task") or {}
        name = options["tokenizer_path"] if options.get("pipeline") else task.get("tokenizer")
        return self.found(name) if name else None

    def check_source(self, source: Path) -> None:
        """Refuse a source with another tokenizer; warn if its documents begin or end otherwise."""
        path, is_known = self.tokenizer(source / TOKENIZER_NAME)
        if not is_known:
            return
        text = self.text_format(tokenizer := load_tokenizer(path))
        begin, end, card = text.begin_of_text, text.end_of_text, SourceCard.read(source)
        if card.eos_id != tokenizer.token_to_id(end):
            logger.warning(
                f"{self.path} was trained on documents that end in {end}, {source} ends them in "
                f"{tokenizer.id_to_token(card.eos_id)}: prepare it again, with --eos-token '{end}'"
            )
        if card.bos_id != (None if begin is None else tokenizer.token_to_id(begin)):
            here, there = ("with", "without") if begin else ("without", "with")
            logger.warning(
                f"{self.path} was trained on documents {here} BOS, {source} has them {there} it: "
                f"prepare it again, {there} --no-bos"
            )

    def generated_task(self) -> "Task | None":
        """Return the task whose examples the run reads; None for text or before a checkpoint."""
        from titan_loop.data.tasks.recorded_task import recorded_task  # numpy, too

        newest = self.newest("manifest")
        return None if newest is None else recorded_task(newest.manifest["data"])

    def _cards(self) -> dict[Path, SourceCard]:
        there = (source for source in self.sources if (source / CARD_NAME).is_file())
        return {source: SourceCard.read(source) for source in there}

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, in increasing order."""
        return committed_steps(self.directory.checkpoints)

    def newest(self, look_at: LookAt = "sizes") -> SavedCheckpoint | None:
        """Return the newest whole checkpoint, None before the first; raises as `newest_good`."""
        found = newest_good(self.directory.checkpoints, look_at=look_at)
        return found and SavedCheckpoint(self.directory.checkpoint(found[0]), found[1])

    def checkpoint(self) -> SavedCheckpoint:
        """Return the checkpoint by which the run was opened, or the newest whole one."""
        found = self._checkpoint or self.newest()
        if found is None:
            raise UserError(
                f"{self.directory.checkpoints} has no committed checkpoint; train first"
            )
        return found

    def trained_tokens(self) -> int:
        """Return the tokens trained on up to the checkpoint, earlier stages included."""
        chain = self.lineage()
        before = sum(
            parent.manifest["trainer"]["tokens"]
            for parent, child in itertools.pairwise(chain)
            # A copy with more layers counts on from its parent; a stage begins at 0.
            if parent.manifest is not None and SavedRun(child.run).parent is not None
        )
        return before + self.checkpoint().tokens

    def lineage(self) -> list[Ancestor]:
        """Return the runs that this one descends from, oldest first, and itself as the last.

        A recipe's folder may have been moved: a parent that is not where the manifest says is
        looked for beside its child, and taken if its manifest has the recorded hash.
        """
        chain: list[Ancestor] = []
        checkpoint, manifest = None, None
        for step in reversed(self.steps()):
            checkpoint = self.directory.checkpoint(step)
            if (manifest := _manifest_or_none(checkpoint)) is not None:
                break
        while checkpoint is not None and len(chain) < 1000:  # a damaged chain may be a cycle
            lineage = {} if manifest is None else manifest["lineage"]
            run = checkpoint.parent.parent
            chain.append(Ancestor(run, lineage.get("stage") or "", checkpoint, manifest))
            checkpoint, manifest = _find_origin(lineage.get("origin"), beside=run)
        return chain[::-1]


def _parsed(mixture: Sequence[str]) -> "tuple[MixtureEntry, ...]":
    from titan_loop.data.load.mixture import parse_mixture  # numpy, which `status` does without

    return parse_mixture(mixture) if mixture else ()


def _find_origin(
    origin: Mapping[str, str] | None, *, beside: Path
) -> tuple[Path | None, dict[str, Any] | None]:
    if origin is None:
        return None, None
    recorded = Path(origin["path"])
    moved = beside.parent / Path(*recorded.parts[-3:])
    for path in (recorded, moved):
        manifest = _manifest_or_none(path)
        if manifest is not None and manifest["sha256"] == origin["manifest_sha256"]:
            return path, manifest
    return recorded, None


def _manifest_or_none(checkpoint: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(checkpoint)
    except UserError:
        return None
