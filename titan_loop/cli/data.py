"""`titan-loop data VERB`: from text to sources; most verbs are functions of `titan_loop.data`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_loop.cli.arguments import group
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import UserError, raise_first
from titan_loop.plugins import Verb
from titan_loop.tables import columns

if TYPE_CHECKING:
    from titan_loop.training.trainer import LoopTrainer


def verify(source: str) -> None:
    """Check a prepared source's files and ids against its source.json.

    Reads everything and names every file that differs.

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
            f"source {source} is damaged (faults: {faults}); restore its files or prepare it again"
        )
    print(f"{source}: sound")


def plan(recipe: str, flags: Sequence[str]) -> None:
    """Compare the tokens a recipe needs with the tokens prepared.

    Prints for every stage the tokens needed and available, epochs and disk size of each source.
    Exits with code 2 if a stage needs more tokens than its data has within --dataloader.max-epochs.
    All other flags are flags of titan-loop train.

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
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
    shortage = ""
    try:
        loader.require_windows(windows)
    except UserError as error:
        shortage = str(error)
    demand = loader.demand(windows)
    rows = [("source", "needed", "available", "epochs", "most", "GB on disk")]
    for row in demand:
        tokens = f"{row.needed_tokens:,}", f"{row.available_tokens:,}"
        most = "-" if row.max_epochs is None else str(row.max_epochs)
        rows.append((row.name, *tokens, f"{row.epochs:.3f}", most, f"{row.disk_bytes / 1e9:.3f}"))
    rows.append(("all", "", "", "", "", f"{sum(row.disk_bytes for row in demand) / 1e9:.3f}"))
    for line in columns(rows):
        print(f"  {line}")
    for remark in config.held_out.remarks(config.dataloader.source_paths(), seq_len):
        print(f"  {remark}")
    return shortage


VERBS = {
    "demo": Verb(
        "titan_loop.data.demo.sources:demo_sources",
        "Build the quick start's sources from the text of this Python installation.",
    ),
    "train-tokenizer": Verb(
        "titan_loop.data.prepare.make_tokenizer:train_tokenizer",
        "Train a byte-level BPE on documents and write its tokenizer.json.",
    ),
    "tokenize": Verb(
        "titan_loop.data.prepare.tokenize_source:tokenize_source",
        "Prepare documents as a source: read, clean, tokenise, shuffle.",
    ),
    "pack": Verb(
        "titan_loop.data.prepare.packing:pack_source",
        "Pack whole documents into windows, best fit first.",
    ),
    "show": Verb(
        "titan_loop.data.inspect_source:show_source",
        "Print documents of a prepared source as the model reads them.",
    ),
    "verify": verify,
    "plan": plan,
}
run = group("data", VERBS)
