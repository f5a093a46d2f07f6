"""Prepare a source: datatrove reads, cleans, splits, tokenises and shuffles; we write the card.

    reader ─► quality ─► MinHash ─► decontamination ─┬─► tokenizer ─► train/*.ds ───┬─► source.json
              filters    filter     filter           └─► held-out text ─► tokenizer ┘

With MinHash three stages come first: signatures (of what passes the quality filters), buckets and
clusters. Documents are shuffled here, once, within each task's output; later only windows are
permuted. Finished tasks are skipped when an interrupted preparation is started again.
"""

import json
import logging
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_loop.data.prepare.config import read_prepare_config
from titan_loop.data.prepare.documents import Documents, Format, find_documents
from titan_loop.data.prepare.preparation import SPLITS, Preparation
from titan_loop.data.source_card import CARD_NAME, LOCK_NAME, SourceCard, file_sha256, lock_source
from titan_loop.errors import UserError, nearest
from titan_loop.storage.json_files import write_json
from titan_loop.storage.local_path import require_local
from titan_loop.text.chatml import control_tokens
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_NAME,
    load_tokenizer,
    require_token,
    token_bytes,
)

if TYPE_CHECKING:
    from titan_loop.data.prepare.executors import Executor

logger = logging.getLogger(__name__)

SETTINGS_NAME = "preparation.json"
_FOLDERS = (*SPLITS, "logs", "work")


def tokenize_source(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer_path: str | Path,
    held_out_inputs: str | Path | Sequence[str | Path] | None = None,
    held_out_fraction: float = 0.01,
    format: Format = "auto",
    patterns: Sequence[str] = (),
    dataset_config: str | None = None,
    dataset_split: str = "train",
    eos_token: str = END_OF_TEXT,
    text_key: str = "text",
    chat: bool = False,
    config_path: str | Path | None = None,
    executor: "Executor" = "local",
    tasks: int = 1,
    workers: int = 1,
    max_malformed: float = 0.01,
    licence: str = "not stated",
    overwrite: bool = False,
    command: str | None = None,
) -> SourceCard | None:
    """Prepare documents as the source `output`.

    The held-out split is, in this order: `held_out_inputs`; the file `held_out.jsonl` beside
    `train.jsonl` if `inputs` is a folder with both; else the documents whose hash falls into
    `held_out_fraction`.

    Args:
        inputs: JSONL (plain, gz or zst), Parquet or text files, folders of one of these, or the
            name of a Hugging Face dataset.
        output: The source's folder; made if missing.
        tokenizer_path: A `tokenizer.json`, copied into the source.
        held_out_inputs: As `inputs`, for the held-out split.
        held_out_fraction: Used as said above, in [0, 1).
        format: See `find_documents`, as for the three arguments that follow.
        patterns: Glob patterns for files in folders.
        dataset_config: A Hugging Face dataset's configuration.
        dataset_split: A Hugging Face dataset's split.
        eos_token: Appended to every document; must be in the vocabulary.
        text_key: The field with a document's text.
        chat: Whether records are conversations (`titan_loop.text.chatml`).
        config_path: The TOML file of `titan_loop.data.prepare.config`.
        executor: "local", "slurm" or "ray".
        tasks: datatrove tasks; at most one a file has work. Each writes one shard a split.
        workers: Tasks that run at the same time.
        max_malformed: The largest share of records, in [0, 1], that may be malformed or lack the
            text field.
        licence: A note for `source.json`.
        overwrite: Replace a complete source, or what other settings left unfinished.
        command: The command line recorded in `source.json`; default: this process's.

    Returns:
        The card that was written; None if jobs were submitted, the last of which writes it.

    Raises:
        UserError: For inputs, settings or an output that cannot be used, an output that another
            process prepares or packs, too many malformed records, or a source without a token to
            train on.
    """
    from titan_loop.data.prepare.executors import EXECUTORS, Stage, run_stages
    from titan_loop.data.prepare.finish import write_card
    from titan_loop.data.prepare.stages import build_stages

    require_local(output, "output")
    output = Path(output).absolute()
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held_out_fraction {held_out_fraction} must lie in [0, 1)")
    if not 0 <= max_malformed <= 1:
        raise UserError(f"max_malformed {max_malformed} must lie in [0, 1]")
    if tasks < 1 or workers < 1:
        raise UserError(f"tasks {tasks} and workers {workers} must both be at least 1")
    if executor not in EXECUTORS:
        raise UserError(f"executor {executor!r} is not known{nearest(executor, EXECUTORS)}")
    config = read_prepare_config(config_path)
    if chat and "c4_quality" in config.quality:
        raise UserError("quality.c4_quality rewrites texts, which chats do not allow: drop it")
    if chat and text_key != "text":
        raise UserError(f"text_key {text_key!r} has no effect on chats: drop it")
    documents = find_documents(
        inputs,
        held_out_inputs,
        format=format,
        patterns=patterns,
        dataset_config=dataset_config,
        dataset_split=dataset_split,
        ours=[output / LOCK_NAME, *(_written(output) if _is_source(output) else ())],
    )
    preparation = Preparation(
        output=output,
        documents=documents,
        config=config,
        held_out_fraction=0.0 if documents.held_out_files else held_out_fraction,
        eos_token=eos_token,
        text_key=text_key,
        chat=chat,
        tasks=min(tasks, len(documents.all_files()) or tasks),
        max_malformed=max_malformed,
        licence=licence,
        command=shlex.join(sys.argv) if command is None else command,
    )
    if preparation.tasks < tasks:
        logger.info("%d tasks instead of %d: no more have a file", preparation.tasks, tasks)
    tokenizer = load_tokenizer(tokenizer_path)
    require_token(tokenizer, eos_token, "eos_token")
    token_bytes(tokenizer)  # refuses ids that do not fit
    if chat:
        control_tokens(tokenizer, eos_token)
    if documents.format == "huggingface":
        _require_dataset(documents)
    _refuse_output(output, overwrite)  # before a lock file is left in it
    try:
        with lock_source(output, "output"):
            _start(preparation, Path(tokenizer_path), overwrite)
            stages = build_stages(preparation)
            if executor == "slurm":  # nobody waits there, so a last job finishes
                finish = partial(_finish, preparation)
                stages.append(
                    Stage(name="card", steps=[finish], tasks=1, logs=preparation.logs("card"))
                )
            options = {"slurm": config.slurm, "ray": config.ray}.get(executor, {})
            if not run_stages(stages, executor, workers, options):
                logger.info("%s: submitted; the last job writes %s", output, CARD_NAME)
                return None
            return write_card(preparation)
    except OSError as error:
        raise UserError(
            f"output {output} cannot be written ({error.strerror or error}): free space or mend "
            "the path, then give the same command again; finished tasks are kept"
        ) from error


def _finish(preparation: Preparation, data: object, rank: int, world_size: int) -> None:
    """Write the card as a step of datatrove's."""
    from titan_loop.data.prepare.finish import write_card

    write_card(preparation)


def _require_dataset(documents: Documents) -> None:
    """Fail before any task starts if a Hugging Face dataset cannot be had."""
    from datasets import get_dataset_split_names

    try:
        splits = get_dataset_split_names(documents.dataset, documents.dataset_config)
    except Exception as error:  # the library and the hub client raise many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"dataset {documents.dataset!r} cannot be loaded ({reason}): check its name and the "
            "network, or download it and give its files"
        ) from error
    if documents.dataset_split not in splits:  # slices cannot be streamed
        raise UserError(
            f"dataset {documents.dataset!r} has no split {documents.dataset_split!r}: give "
            f"--dataset-split one of {', '.join(splits)}"
        )


def _is_source(output: Path) -> bool:
    """Return whether a preparation was started in this folder, or finished."""
    return (output / CARD_NAME).exists() or (output / SETTINGS_NAME).exists()


def _written(output: Path) -> list[Path]:
    """Return all that a preparation writes: no documents, should they lie in an input folder."""
    return [output / name for name in (*_FOLDERS, CARD_NAME, SETTINGS_NAME, TOKENIZER_NAME)]


def _refuse_output(output: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a complete source, or what no preparation wrote."""
    foreign = next((name for name in _FOLDERS if (output / name).exists()), None)
    if (output / CARD_NAME).exists() and not overwrite:
        raise UserError(f"source {output} exists already: give another output or pass overwrite")
    if foreign is not None and not _is_source(output):
        raise UserError(
            f"output {output} holds a {foreign!r} that is not a source's: give another output"
        )


def _start(preparation: Preparation, tokenizer_path: Path, overwrite: bool) -> None:
    """Make the output ready: new, or with what the same settings finished before."""
    output = preparation.output
    settings = _settings(preparation, tokenizer_path)
    tokenizer = tokenizer_path.read_bytes()  # it may lie in what is removed below
    _refuse_output(output, overwrite)  # it may have been finished meanwhile
    unfinished = output / SETTINGS_NAME
    if overwrite and _is_source(output):
        # First what makes the source count, then the rest.
        (output / CARD_NAME).unlink(missing_ok=True)
        for name in _FOLDERS:
            shutil.rmtree(output / name, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
    elif unfinished.exists():
        known = json.loads(unfinished.read_text())
        changed = [name for name in settings if settings[name] != known.get(name)]
        if changed:
            raise UserError(
                f"source {output} is unfinished with other settings ({', '.join(changed)}): give "
                "those again to go on from there, or pass overwrite to begin anew"
            )
    (output / TOKENIZER_NAME).write_bytes(tokenizer)
    write_json(unfinished, settings)


def _settings(preparation: Preparation, tokenizer_path: Path) -> dict[str, Any]:
    """Return what decides which tokens are stored, as JSON gives it back."""
    settings = {
        "documents": asdict(preparation.documents),
        "bytes": [Path(path).stat().st_size for path in preparation.documents.all_files()],
        "tokenizer": file_sha256(tokenizer_path),
        "cleaning": preparation.config.cleaning(),
        **{
            name: getattr(preparation, name)
            for name in ("held_out_fraction", "eos_token", "text_key", "chat", "tasks")
        },
        "versions": preparation.versions(),
    }
    return json.loads(json.dumps(settings))
