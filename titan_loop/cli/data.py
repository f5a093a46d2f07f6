"""`titan-loop data VERB`: from text to prepared sources; a thin layer over `titan_loop.data`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from titan_loop.cli.arguments import group, recipe_first
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import UserError, raise_first
from titan_loop.tables import columns

if TYPE_CHECKING:
    from titan_loop.training.trainer import LoopTrainer

_PLAN_HEADER = ("source", "needed", "available", "epochs", "most", "GB on disk")


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents to read.

    Attributes:
        inputs: JSONL (plain, gz, zst), Parquet or text files, or folders of one of these.
        format: Format of the files; auto goes by their names.
        pattern: Patterns of file names in folders, e.g. '*.py' '*.md'.
        text_key: Field that holds a document's text.
    """

    inputs: Annotated[Positional[tuple[str, ...]], arg(help_behavior_hint="(one or more)")]
    format: Literal["auto", "jsonl", "parquet", "text", "huggingface"] = "auto"
    pattern: tuple[str, ...] = ()
    text_key: str = "text"


def fetch(name: str, *, output: Path, files: int | None = None) -> None:
    """Download a public data set or tokenizer from the Hugging Face Hub.

    Names: fineweb-edu, openwebmath, tinystories, wikitext; ouro-tokenizer, smollm2-tokenizer,
    gpt2-tokenizer. Give the same command again to continue after an interruption.

    Args:
        name: Name of the set.
        output: Folder for its files.
        files: Most files to download, the first by name.
    """
    from titan_loop.data.prepare import fetch as fetching

    paths = fetching.fetch(name, output, files=files)
    licence = fetching.PUBLIC_SETS[name].licence
    for path in paths:
        print(path)
    print(f"Licence: {licence}; give it to data tokenize with --licence '{licence}'")


def train_tokenizer(documents: Documents, *, vocab_size: int, output: str) -> None:
    """Train a byte-level BPE on documents and write its tokenizer.json.

    Args:
        documents: Documents to read.
        vocab_size: Number of tokens, special ones included.
        output: Path of the new tokenizer.json.
    """
    from titan_loop.data.prepare import make_tokenizer

    path = make_tokenizer.train_tokenizer(
        documents.inputs,
        vocab_size=vocab_size,
        output=output,
        text_key=documents.text_key,
        format=documents.format,
        patterns=documents.pattern,
    )
    print(path)


def import_tokenizer(input: str, *, output: str, split_pattern: str | None = None) -> None:
    """Convert a tiktoken rank file to a tokenizer.json.

    Args:
        input: tiktoken rank file, or a tokenizer.json to copy.
        output: Path of the new tokenizer.json.
        split_pattern: Pre-tokenisation pattern of the rank file, from its publisher.
    """
    from titan_loop.data.prepare import make_tokenizer

    print(make_tokenizer.import_tokenizer(input, output=output, split_pattern=split_pattern))


def tokenize(
    documents: Documents,
    *,
    output: str,
    tokenizer: str,
    chat: bool = False,
    held_out_inputs: tuple[str, ...] = (),
    held_out_fraction: float = 0.01,
    dataset_config: str | None = None,
    dataset_split: str = "train",
    eos_token: str = "<|endoftext|>",
    config: str | None = None,
    executor: Literal["local", "slurm", "ray"] = "local",
    tasks: int = 1,
    workers: int = 1,
    max_malformed: float = 0.01,
    licence: str = "not stated",
    overwrite: bool = False,
) -> None:
    """Prepare documents as a source: read, clean, tokenise, shuffle.

    --dataloader.mixture reads the result. Give the same command again to continue after an
    interruption.

    Args:
        documents: Documents to read.
        output: Folder of the source.
        tokenizer: A tokenizer.json.
        chat: Records are conversations ('messages', or 'question' and 'answer'): render them as
            ChatML with a loss mask.
        held_out_inputs: Documents that are never trained on.
        held_out_fraction: Share of documents held out if there are neither --held-out-inputs nor a
            held_out.jsonl.
        dataset_config: Configuration of a Hugging Face dataset.
        dataset_split: Split of a Hugging Face dataset.
        eos_token: Token that ends every document.
        config: TOML file with deduplication, quality filters, decontamination and cluster.
        executor: datatrove's executor.
        tasks: Number of parts the work is cut into.
        workers: Number of tasks that run at the same time.
        max_malformed: Largest share of records that may be malformed or lack their text.
        licence: Licence to note in source.json.
        overwrite: Replace a complete or unfinished source.
    """
    from titan_loop.data.prepare.tokenize_source import tokenize_source

    tokenize_source(
        documents.inputs,
        output,
        tokenizer_path=tokenizer,
        held_out_inputs=held_out_inputs or None,
        held_out_fraction=held_out_fraction,
        format=documents.format,
        patterns=documents.pattern,
        dataset_config=dataset_config,
        dataset_split=dataset_split,
        eos_token=eos_token,
        text_key=documents.text_key,
        chat=chat,
        config_path=config,
        executor=executor,
        tasks=tasks,
        workers=workers,
        max_malformed=max_malformed,
        licence=licence,
        overwrite=overwrite,
    )


def pack(
    source: str,
    *,
    seq_len: int,
    long_documents: Literal["refuse", "split"] = "refuse",
) -> None:
    """Pack whole documents into windows, best fit first.

    Stores the packing beside the source: for long contexts and chats, which should not be cut.

    Args:
        source: Folder of the source.
        seq_len: Number of predicted tokens per window.
        long_documents: Refuse documents longer than a window, or split them.
    """
    from titan_loop.data.prepare.packing import pack_source

    pack_source(source, seq_len, long_documents=long_documents)


def show(source: str, *, count: int = 3, split: Literal["train", "held_out"] = "train") -> None:
    """Print documents of a prepared source as the model reads them.

    Special tokens are written out; if there is a loss mask, targets stand in ⟦ ⟧.

    Args:
        source: Folder of the source.
        count: Number of documents to print.
        split: Split of the source.
    """
    from titan_loop.data.inspect_source import show_source

    for document in show_source(source, count, split):
        targets = "" if document.targets is None else f", {document.targets} targets"
        print(
            f"--- document {document.number}: {document.tokens} tokens from token "
            f"{document.first_token} on{targets}"
        )
        print(document.text)


def verify(source: str) -> None:
    """Check a prepared source's files and ids against its card.

    Reads everything and names every file that differs from source.json.

    Args:
        source: Folder of the source.
    """
    from titan_loop.data.inspect_source import verify_source

    faults = 0
    for fault in verify_source(source):
        faults += 1
        print(fault)
    if faults:
        raise UserError(
            f"source {source} has {faults} faults: restore these files or prepare it again"
        )
    print(f"{source}: sound")


@recipe_first
def plan(recipe: str, flags: Sequence[str]) -> None:
    """Compare the tokens a recipe needs with those prepared.

    Prints for every stage the tokens needed and available, epochs and disk size of each source.
    Ends with code 2 if repetition caps leave a stage without data. Takes the flags of titan-loop
    train.

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
        flags: Flags of the recipe.
    """
    shortages: list[str] = []
    for stage in resolve_recipe(recipe, flags, verb="data plan").stages:
        try:
            shortage = _plan_stage(stage.name, stage.config)
        except UserError as error:
            shortage = str(error)
        if shortage:
            shortages.append(f"{stage.name}: {shortage}")
    if shortages:  # after the tables of the other stages
        raise UserError("; ".join(shortages))


def _plan_stage(name: str, config: "LoopTrainer.Config") -> str:
    """Print one stage's table; return why it cannot be filled, empty if it can."""
    from titan_loop.data.load.loader import WindowLoader
    from titan_loop.training.preflight import value_refusals

    raise_first(value_refusals(config))
    windows = config.windows_of_the_run()
    seq_len = config.training.seq_len
    print(f"{name}: {windows * seq_len:,} tokens in {windows:,} windows of {seq_len}")
    loader = config.open_data()
    if not isinstance(loader, WindowLoader):
        print("  generated or streamed: nothing to compare with")
        return ""
    try:
        loader.require_windows(windows)
        shortage = ""
    except UserError as error:
        shortage = str(error)
    rows: list[tuple[str, ...]] = [_PLAN_HEADER]
    size_bytes = 0
    for row in loader.demand(windows):
        size_bytes += row.disk_bytes
        rows.append(
            (
                row.name,
                f"{row.needed_tokens:,}",
                f"{row.available_tokens:,}",
                f"{row.epochs:.3f}",
                "-" if row.max_epochs is None else str(row.max_epochs),
                f"{row.disk_bytes / 1e9:.3f}",
            )
        )
    rows.append(("all", "", "", "", "", f"{size_bytes / 1e9:.3f}"))
    for line in columns(rows):
        print(f"  {line}")
    for remark in config.held_out.remarks(config.dataloader.source_paths(), seq_len):
        print(f"  {remark}")
    return shortage


VERBS = {
    "fetch": fetch,
    "train-tokenizer": train_tokenizer,
    "import-tokenizer": import_tokenizer,
    "tokenize": tokenize,
    "pack": pack,
    "show": show,
    "verify": verify,
    "plan": plan,
}
run = group("data", VERBS)
