"""Prepare a source: datatrove cleans, splits, tokenises and shuffles; titan_loop writes the card.

`pipelines.py` draws the steps. Documents are shuffled once, within each task's output. A restart
skips finished tasks.
"""

import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from titan_loop.data.prepare.chat_records import ChatRecords
from titan_loop.data.prepare.config import Executor, read_prepare_config
from titan_loop.data.prepare.documents import Format, Inputs, find_documents
from titan_loop.data.prepare.preparation import Preparation, refuse_output, start, written_by_us
from titan_loop.data.source_card import CARD_NAME, SourceCard, lock_source
from titan_loop.errors import UserError, require_at_least, require_known
from titan_loop.storage.file_names import require_local
from titan_loop.storage.remote_folder import PATTERN_CHARACTERS
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.template_files import chosen_template
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    require_token,
    template_bos,
    template_prefix,
    token_bytes,
)

if TYPE_CHECKING:
    from titan_loop.data.prepare.pipelines import Pipeline

logger = logging.getLogger(__name__)


def tokenize_source(
    inputs: Inputs = (),
    *,
    output: str | Path,
    tokenizer: str | Path,
    format: Format = "auto",
    pattern: tuple[str, ...] = (),
    text_key: str = "text",
    chat: bool = False,
    messages_key: str | None = None,
    chat_template: str | None = None,
    held_out_inputs: Inputs = (),
    held_out_fraction: float = 0.01,
    eos_token: str = END_OF_TEXT,
    no_bos: bool = False,
    config: str | Path | None = None,
    executor: Executor = "local",
    tasks: int = 1,
    workers: int = 1,
    max_malformed: float = 0.01,
    licence: str = "not stated",
    overwrite: bool = False,
) -> SourceCard | None:
    """Prepare documents as a source: read, clean, tokenise, shuffle.

    --dataloader.mixture reads the result. Give the same command again to continue after an
    interruption.

    Args:
        inputs: Files of JSON lines, JSON arrays, CSV, TSV, Parquet, Arrow or text, compressed or
            not, or folders of these.
        output: Folder of the source.
        tokenizer: A tokenizer.json; it is copied into the source.
        format: Format of the files; auto reads it from their names and first bytes.
        pattern: Patterns of file names in folders, e.g. '*.py' '*.md'.
        text_key: Field that holds a document's text.
        chat: Records are conversations (messages, ShareGPT, question and answer, instruction and
            output, prompt and completion or chosen): write them in a chat template, with a loss
            mask.
        messages_key: Field that holds a conversation's messages.
        chat_template: A file with a Jinja template, or 'tokenizer' for the one beside the
            tokenizer; by default ChatML.
        held_out_inputs: Documents that are never trained on; by default the files called held_out
            or validation of a folder with files called train.
        held_out_fraction: Share of documents held out, chosen by a hash of their text, in [0, 1);
            has no effect beside held-out inputs.
        eos_token: Token that ends every document.
        no_bos: Put no token in front of documents, though the tokenizer's template has one.
        config: TOML file that sets quality filters, deduplication, decontamination and the cluster.
        executor: Run here, or submit a SLURM job array per pipeline.
        tasks: Number of parts the work is cut into; at most one per file has work.
        workers: Number of tasks that run at the same time.
        max_malformed: Largest share of records that may be malformed or lack their text.
        licence: Licence to note in source.json.
        overwrite: Replace a complete or unfinished source.

    Returns:
        The card that was written; None if jobs were submitted, the last of which writes it.
    """
    from titan_loop.data.prepare.finish import write_card
    from titan_loop.data.prepare.pipelines import (
        Pipeline,
        build_pipelines,
        refuse_submitted,
        run_pipelines,
    )

    require_local(output, "output")
    output = Path(output).absolute()
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held_out_fraction {held_out_fraction} must lie in [0, 1)")
    if not 0 <= max_malformed <= 1:
        raise UserError(f"max_malformed {max_malformed} must lie in [0, 1]")
    require_at_least(1, tasks=tasks, workers=workers)
    require_known("executor", executor, get_args(Executor))
    settings = read_prepare_config(config)
    searches = settings.minhash is not None or settings.decontaminate is not None
    if searches and PATTERN_CHARACTERS.intersection(str(output)):
        problem = "holds *, ? or [, by which datatrove would not find its files"
        raise UserError(f"output {output} {problem}: choose another folder")
    if chat and "c4_quality" in settings.quality:
        raise UserError("quality.c4_quality rewrites texts, which chats do not allow: drop it")
    if chat and text_key != "text":
        raise UserError(
            f"text_key {text_key!r} has no effect on chats: give --messages-key, or drop it"
        )
    for name, value in {"messages_key": messages_key, "chat_template": chat_template}.items():
        if value is not None and not chat:
            raise UserError(f"{name} {value!r} has no effect without --chat: add it, or drop this")
    documents = find_documents(
        inputs, held_out_inputs, format=format, pattern=pattern, ours=written_by_us(output)
    )
    loaded = load_tokenizer(tokenizer)
    require_token(loaded, eos_token, "eos_token")
    token_bytes(loaded)  # refuses ids that do not fit
    fix = "give --no-bos, or correct its post_processor"
    bos = None if no_bos else template_bos(loaded, str(tokenizer), fix)
    if no_bos and not template_prefix(loaded):
        raise UserError(f"no_bos has no effect: the template of {tokenizer} has no BOS; drop it")
    chats = None
    if chat:
        template = ChatTemplate()
        if chat_template is not None:
            template = chosen_template(chat_template, Path(tokenizer))
        chats = ChatRecords(template=template, messages_key=messages_key)
        chats.on_card(loaded)  # refuses a template that does not work
    preparation = Preparation(
        output=output,
        documents=documents,
        config=settings,
        held_out_fraction=0.0 if documents.held_out_files else held_out_fraction,
        eos_token=eos_token,
        bos_token=None if bos is None else loaded.id_to_token(bos),
        text_key=text_key,
        chat=chats,
        tasks=min(tasks, len(documents.all_files())),
        max_malformed=max_malformed,
        licence=licence,
        command=shlex.join(sys.argv),
    )
    if preparation.tasks < tasks:
        logger.info("%d tasks instead of %d: one per file", preparation.tasks, tasks)
    refuse_output(output, overwrite)  # before a lock file is left in it
    try:
        with lock_source(output, "output"):
            refuse_submitted(output / "logs")  # before anything is removed
            start(preparation, Path(tokenizer), overwrite)
            pipelines = build_pipelines(preparation)
            if executor == "slurm":  # this process does not wait, so a last job writes the card
                outlines = [replace(each, steps=dict.fromkeys(each.steps)) for each in pipelines]
                last = {"card": partial(_finish, preparation, outlines)}
                logs = preparation.logs("card")
                pipelines.append(Pipeline(name="card", steps=last, tasks=1, logs=logs))
            if not run_pipelines(pipelines, executor, workers, settings.slurm):
                logger.info("%s: submitted; the last job writes %s", output, CARD_NAME)
                return None
            return write_card(preparation, pipelines)
    except OSError as error:
        raise UserError(
            f"output {output} cannot be written ({error.strerror or error}): free space or correct "
            "the path, then give the same command again; finished tasks are kept"
        ) from error


def _finish(preparation: Preparation, pipelines: "Sequence[Pipeline]", *task: object) -> None:
    # `task`, which datatrove adds, is the data of the step before, the rank and the world size.
    from titan_loop.data.prepare.finish import write_card

    write_card(preparation, pipelines)
