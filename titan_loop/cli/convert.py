"""`titan-loop convert import|export`: Ouro and Hugging Face folders, both ways."""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_loop.cli.parser import Parser
from titan_loop.cli.verbs import Verb, run_verb
from titan_loop.errors import UserError

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

    import torch

    from titan_loop.checkpoint.hugging_face.importing import OuroFolder
    from titan_loop.runs.conversion import import_run

    folder = OuroFolder(Path(given.folder))
    dtype = getattr(torch, given.dtype)
    print(import_run(folder, Path(given.output), sys.argv, dtype=dtype))


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
    from titan_loop.runs.saved_run import SavedRun
    from titan_loop.text.tokenizer import load_tokenizer

    run = SavedRun.open(given.checkpoint)
    reader = CheckpointReader(run.checkpoint().path)
    shape = checkpoint_shape(reader, max_positions=run.seq_len)
    known = run.tokenizer(given.tokenizer)
    text = run.text_format(load_tokenizer(known.path))
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


VERBS: dict[str, Verb] = {"import": import_, "export": export}
