"""`titan-loop convert import|export`: Ouro and Hugging Face folders, both ways."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from titan_loop.cli.arguments import group
from titan_loop.errors import UserError

Dtype = Literal["float32", "bfloat16"]

logger = logging.getLogger(__name__)


def import_(folder: Path, *, output: Path, dtype: Dtype = "float32") -> None:
    """Read a folder of the Ouro format, released or exported, into a new run directory.

    Args:
        folder: Folder with config.json and safetensors.
        output: New run directory.
        dtype: Type of the checkpoint's weights; training needs float32, which holds bfloat16
            weights exactly.
    """
    import torch

    from titan_loop.families.ouro.hugging_face.importing import OuroFolder, import_run

    print(import_run(OuroFolder(folder), output, sys.argv, dtype=getattr(torch, dtype)))


def export(
    checkpoint: Path,
    *,
    output: Path,
    dtype: Dtype = "float32",
    chatml: bool = False,
    no_chatml: bool = False,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    max_shard_gigabytes: float = 5.0,
    ema: bool = False,
    push: str | None = None,
) -> None:
    """Write a checkpoint as a folder of the Ouro format, with its own code for transformers.

    Args:
        checkpoint: Run, for its newest checkpoint, or a step-N folder.
        output: New folder.
        dtype: Type of the weights; float32 loses nothing, bfloat16 is what the released models
            have.
        chatml: Write a ChatML template and stop after a turn; the default if the run's data is
            prepared conversations. An imported run keeps what its folder had.
        no_chatml: Write no ChatML template.
        tokenizer: A tokenizer.json; by default that of the run's data.
        eos_token: Token that ends every document; by default that of the run's data.
        max_shard_gigabytes: Most weights in one safetensors file.
        ema: Write the average of the weights that --ema.decay kept in training.
        push: Upload the folder to this repository of the Hugging Face Hub, OWNER/NAME; a new one
            is private.
    """
    if not 0 < max_shard_gigabytes < float("inf"):
        raise UserError(f"--max-shard-gigabytes={max_shard_gigabytes} must be a number above 0")
    if chatml and no_chatml:
        raise UserError("--chatml and --no-chatml contradict each other; leave one of them out")

    import torch

    from titan_loop.checkpoint.tensors import CheckpointReader
    from titan_loop.families.ouro.hugging_face.exporting import checkpoint_shape, export_folder
    from titan_loop.families.ouro.hugging_face.tokenizer_files import open_tokenizer
    from titan_loop.runs.saved_run import SavedRun
    from titan_loop.text.tokenizer import load_tokenizer

    run = SavedRun.open(checkpoint)
    reader = CheckpointReader(run.checkpoint().path, ema=ema)
    shape = checkpoint_shape(reader, max_positions=run.seq_len)
    known = run.tokenizer(tokenizer)
    text = run.text_format(load_tokenizer(known.path))
    if chatml or no_chatml:
        text = text.with_chatml() if chatml else text.without_chat()
    if eos_token is not None:
        text = replace(text, end_of_text=eos_token)
    export_folder(
        reader,
        output,
        shape=shape,
        tokenizer=open_tokenizer(
            known.path, vocab_size=shape.vocab_size, text=text, is_known=known.is_known
        ),
        dtype=getattr(torch, dtype),
        max_shard_bytes=int(max_shard_gigabytes * 1e9),
        trained_tokens=run.trained_tokens(),
    )
    if not (chatml or no_chatml or known.is_known):
        logger.warning(
            "%s has no chat template: without its data it is unknown whether the model was trained "
            "on conversations; if it was, export again with --chatml",
            output,
        )
    print(output)
    if push is not None:
        from titan_loop.families.ouro.hugging_face.pushing import push_folder

        print(push_folder(output, push))


run = group("convert", {"import": import_, "export": export})
