"""`titan-loop convert import|export`: Ouro and Hugging Face folders, both ways."""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_loop.cli.parser import Parser
from titan_loop.cli.verbs import Verb, run_verb
from titan_loop.errors import UserError

if TYPE_CHECKING:
    from titan_loop.text.text_format import TextFormat

DTYPES = ("float32", "bfloat16")
SHARD_GIGABYTES = 5.0

logger = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> int:
    """Run one of the two directions."""
    return run_verb("convert", VERBS, arguments)


def import_(arguments: Sequence[str]) -> None:
    """Turn a released Ouro folder, or an export, into a run with one checkpoint."""
    parser = Parser("convert import", "Read a folder of the Ouro format into a new run directory.")
    parser.add_argument("folder", help="holds config.json and safetensors")
    parser.add_argument("--output", required=True, help="the new run directory")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the checkpoint; training needs float32, which holds bfloat16 weights exactly",
    )
    given = parser.parse(arguments)

    import shutil

    import torch

    from titan_loop.checkpoint.hugging_face.importing import (
        OuroFolder,
        import_folder,
        model_options,
    )
    from titan_loop.runs.run_directory import RunDirectory
    from titan_loop.storage.staged_folder import staged_folder

    folder = OuroFolder(Path(given.folder))
    config = {
        "total_tokens": 0,  # none are trained on here
        "model": asdict(model_options(folder.shape)),
        "training": {"seq_len": folder.shape.max_positions},
        "dataloader": {"mixture": []},
        "checkpoint": {"folder": "checkpoints"},
        "text": None if folder.text is None else asdict(folder.text),
    }
    with staged_folder(Path(given.output)) as staged:
        new = RunDirectory(staged)
        import_folder(folder, new.checkpoint(0), dtype=getattr(torch, given.dtype))
        if folder.tokenizer is not None:
            shutil.copyfile(folder.tokenizer, staged / folder.tokenizer.name)
        new.create_or_open(sys.argv, config=config)
    print(RunDirectory(given.output).checkpoint(0))


def export(arguments: Sequence[str]) -> None:
    """Turn a checkpoint into a folder that transformers loads."""
    parser = Parser(
        "convert export",
        "Write a checkpoint as a folder of the Ouro format, with code of its own for transformers.",
    )
    parser.add_argument(
        "checkpoint", help="a run, whose newest checkpoint is taken, or a step-N folder"
    )
    parser.add_argument("--output", required=True, help="the new folder")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights; float32 loses nothing, bfloat16 is what the released models have",
    )
    parser.add_argument(
        "--chatml",
        action=argparse.BooleanOptionalAction,
        help="write a ChatML template and stop after a turn; default if the run's data is prepared "
        "conversations; an imported run keeps what its folder had",
    )
    parser.add_argument("--tokenizer", help="a tokenizer.json; default that of the run's data")
    parser.add_argument("--eos-token", help="ends every document; default that of the run's data")
    parser.add_argument(
        "--max-shard-gigabytes",
        type=float,
        default=SHARD_GIGABYTES,
        help="most weights in one safetensors file",
    )
    given = parser.parse(arguments)
    if given.max_shard_gigabytes <= 0:
        raise UserError(f"--max-shard-gigabytes={given.max_shard_gigabytes} must be above 0")

    import torch

    from titan_loop.checkpoint.hugging_face.exporting import checkpoint_shape, export_folder
    from titan_loop.checkpoint.hugging_face.tokenizer_files import open_tokenizer
    from titan_loop.checkpoint.tensors import CheckpointReader
    from titan_loop.inference.loading import find_checkpoint
    from titan_loop.runs.run_directory import RunDirectory

    checkpoint, run = find_checkpoint(Path(given.checkpoint))
    config = RunDirectory(run).read_config()
    reader = CheckpointReader(checkpoint)
    shape = checkpoint_shape(reader, max_positions=config["training"]["seq_len"])
    known = _find_tokenizer(run, config, given.tokenizer)
    text = known.text
    if given.chatml is not None:
        text = text.with_chatml() if given.chatml else text.without_chat()
    if given.eos_token is not None:
        text = replace(text, end_of_text=given.eos_token)
    tokenizer = open_tokenizer(
        known.path, vocab_size=shape.vocab_size, text=text, is_known=known.is_known
    )
    export_folder(
        reader,
        Path(given.output),
        shape=shape,
        tokenizer=tokenizer,
        dtype=getattr(torch, given.dtype),
        max_shard_bytes=int(given.max_shard_gigabytes * 1e9),
    )
    if given.chatml is None and not known.is_known:
        logger.warning(
            "%s has no chat template: whether the model was trained on conversations is not known "
            "without its data; if it was, export again with --chatml",
            given.output,
        )
    print(given.output)


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """A tokenizer, how text ends in it, and whether the model is known to be its own."""

    path: Path
    text: "TextFormat"
    is_known: bool


def _find_tokenizer(run: Path, config: Mapping[str, Any], given: str | None) -> _Tokenizer:
    """Return the tokenizer of the training data, or the given one if it is the same.

    Raises:
        UserError: It is another one, or there is none to take.
    """
    from titan_loop.data.load.mixture import parse_mixture
    from titan_loop.data.source_card import CARD_NAME, SourceCard, file_sha256, text_format
    from titan_loop.text.text_format import TextFormat
    from titan_loop.text.tokenizer import TOKENIZER_NAME, load_tokenizer

    imported = run / TOKENIZER_NAME
    mixture = config["dataloader"].get("mixture")
    sources = [Path(entry.path) for entry in parse_mixture(mixture)] if mixture else []
    sources = [path for path in sources if (path / CARD_NAME).is_file()]
    if imported.is_file():
        own, sha256 = imported, file_sha256(imported)
        text = TextFormat(**(config.get("text") or {}))  # runs of earlier imports have none
    elif sources:
        cards = [SourceCard.read(path) for path in sources]
        own, sha256 = sources[0] / TOKENIZER_NAME, cards[0].tokenizer_sha256
        text = text_format(cards, load_tokenizer(own))
    elif given is not None:
        return _Tokenizer(Path(given), TextFormat(), is_known=False)
    else:
        raise UserError(
            f"the data that {run} was trained on is not here; give its tokenizer with --tokenizer"
        )
    path = own if given is None else Path(given)
    load_tokenizer(path)
    if file_sha256(path) != sha256:
        raise UserError(f"tokenizer {path} is not the one {run} was trained with; use {own}")
    return _Tokenizer(path, text, is_known=True)


VERBS: dict[str, Verb] = {"import": import_, "export": export}
