"""`titan-loop convert import|export`: models from and for other programs."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from titan_loop.cli.arguments import group
from titan_loop.errors import UserError, require_at_least
from titan_loop.tables import columns

if TYPE_CHECKING:
    from titan_loop.formats.llama_shape import LlamaShape
    from titan_loop.formats.tokenizer_export import TokenizerExport
    from titan_loop.runs.saved_run import SavedRun

Dtype = Literal["float32", "bfloat16"]
ExportDtype = Literal[
    "float32", "bfloat16", "float16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "int8", "int4"
]

logger = logging.getLogger(__name__)


def import_(folder: Path, *, output: Path, dtype: Dtype = "float32") -> None:
    """Import a released or exported model as a new run directory.

    Args:
        folder: Folder with config.json and safetensors.
        output: New run directory.
        dtype: Type of the checkpoint's weights; training needs float32, which holds bfloat16
            weights exactly.
    """
    import torch

    from titan_loop.formats.importing import ModelFolder, import_run

    print(import_run(ModelFolder(folder), output, sys.argv, dtype=getattr(torch, dtype)))


def export(
    checkpoint: Path,
    *,
    output: Path | None = None,
    to: str = "transformers",
    list: bool = False,
    dtype: ExportDtype = "float32",
    recurrent_steps: int | None = None,
    chatml: bool = False,
    no_chatml: bool = False,
    tokenizer: str | None = None,
    no_tokenizer: bool = False,
    approximate_tokenizer: bool = False,
    eos_token: str | None = None,
    max_shard_gigabytes: float = 5.0,
    ema: bool = False,
    measure: tuple[str, ...] = (),
    measure_steps: tuple[int, ...] = (),
    measure_windows: int = 16,
) -> None:
    """Write a checkpoint in a format that other programs read.

    Args:
        checkpoint: Run (its newest checkpoint is taken) or a step-N folder.
        output: New folder; for gguf, a new file.
        to: Format; --list prints the choices for this model.
        list: Print all formats: whether this model can be written in each, and if not, the reason.
        dtype: Type of the weights; float32 loses nothing, released models use bfloat16. Only gguf
            has the q types, which but for q8_0 need the extra llama-cpp; only onnx int8 and int4.
        recurrent_steps: R to export; by default R of the last training step.
        chatml: Write a ChatML template, and let generation stop at the end of a turn; the default
            if the run's data is conversations. An imported run keeps its folder's template.
        no_chatml: Write no ChatML template.
        tokenizer: A tokenizer.json; by default the tokenizer of the run's data.
        no_tokenizer: Write no tokenizer.
        approximate_tokenizer: Write a tokenizer into a GGUF although llama.cpp splits some texts
            otherwise, such as Mistral's Tekken; a warning counts them.
        eos_token: Token that ends every document; by default as in the run's data.
        max_shard_gigabytes: Largest size of a safetensors file.
        ema: Write the average of the weights that --ema.decay kept in training.
        measure: Sources of the run, or folders of others; prints bits per byte of their held-out
            text in llama.cpp, as the GGUF has it, beside the run's. Needs the extra llama-cpp.
        measure_steps: Recurrent steps to measure; each other than the export's is written beside
            it, and removed. By default the export's.
        measure_windows: Held-out windows of each source.
    """
    if not 0 < max_shard_gigabytes < float("inf"):
        raise UserError(f"--max-shard-gigabytes={max_shard_gigabytes} must be a number above 0")
    if chatml and no_chatml:
        raise UserError("--chatml and --no-chatml contradict each other; leave one of them out")
    require_at_least(1, **{"--recurrent-steps": recurrent_steps})
    for each in measure_steps:
        require_at_least(1, **{"--measure-steps": each})
    if measure and not to.startswith("gguf"):
        raise UserError(f"--measure reads text in llama.cpp; --to={to} is no GGUF")
    if measure_steps and not measure:
        raise UserError("--measure-steps has no effect without --measure SOURCE")
    if output is None and not list:
        raise UserError("--output is missing; name the new folder or file")

    from titan_loop.checkpoint.tensors import CheckpointReader
    from titan_loop.formats.format import Export, check_tensors, get_format
    from titan_loop.runs.saved_run import SavedRun

    run = SavedRun.open(checkpoint)
    reader = CheckpointReader(run.checkpoint().path, ema=ema)
    trainer = reader.manifest["trainer"]
    steps = recurrent_steps or trainer["recurrent_steps"]
    if list:
        print(_formats_of(run, trainer["architecture"], steps, tokenizer))
        return
    assert output is not None
    form = get_format(to)
    if dtype not in form.dtypes:
        raise UserError(f"--dtype={dtype}: format {to} has {', '.join(form.dtypes)}")

    def of_steps(number: int) -> "LlamaShape":
        return form.shape(
            trainer["architecture"], recurrent_steps=number, max_positions=run.seq_len
        )

    shape = of_steps(steps)
    for each in measure_steps:
        of_steps(each)  # refused before anything is written
    check_tensors(reader, shape)
    windows = None
    if measure:
        from titan_loop.evaluation.engine_scores import require_engine
        from titan_loop.evaluation.window_scores import open_run

        require_engine(shape)
        windows = open_run(run, count=measure_windows, sources=measure)
    known = None
    if not no_tokenizer:
        known = _tokenizer(run, shape.vocab_size, tokenizer, chatml, no_chatml, eos_token)
        known = replace(known, approximate=approximate_tokenizer)
    export = Export(
        reader=reader,
        shape=shape,
        tokenizer=known,
        dtype=dtype,
        max_shard_bytes=int(max_shard_gigabytes * 1e9),
        trained_tokens=run.trained_tokens(),
    )
    form.write(export, output)
    if known is not None and not (chatml or no_chatml or run.tokenizer(tokenizer).is_known):
        logger.warning(
            f"{output} has no chat template: the run's data is missing, so nothing shows whether "
            "it held conversations; if it did, export again with --chatml"
        )
    print(output)
    if windows is None:
        return
    from titan_loop.evaluation.engine_scores import table
    from titan_loop.inference.loading import load_checkpoint

    with TemporaryDirectory(dir=output.parent) as folder:
        files = {steps: output}
        for each in measure_steps:
            if each not in files:
                files[each] = Path(folder) / f"{each}.gguf"
                logging.disable(logging.WARNING)  # said above, of the file that stays
                try:
                    form.write(replace(export, shape=of_steps(each), tokenizer=None), files[each])
                finally:
                    logging.disable(logging.NOTSET)
        files = {each: files[each] for each in measure_steps or files}
        print(table(load_checkpoint(checkpoint, ema=ema).model, files, windows))


def _formats_of(
    run: "SavedRun", architecture: dict, recurrent_steps: int, tokenizer: str | None
) -> str:
    from titan_loop.formats.format import get_format
    from titan_loop.plugins import names

    try:
        path = run.tokenizer(tokenizer).path
    except UserError:  # not here: nothing is said about it
        path = None
    rows = [("format", "this model")]
    for name in names("formats"):
        form = get_format(name)
        answer = f"yes: {form.summary}; {', '.join(form.dtypes)}"
        try:
            shape = form.shape(
                architecture, recurrent_steps=recurrent_steps, max_positions=run.seq_len
            )
            if form.programs is not None:
                answer += f"; {form.programs(shape)}"
            if path is not None and form.tokenizer_problem is not None:
                problem = form.tokenizer_problem(path)
                answer += f"; but its tokenizer {problem}" if problem else ""
        except UserError as error:
            answer = f"no: {error}"
        rows.append((name, answer))
    return "\n".join(columns(rows, left=(0, 1)))


def _tokenizer(
    run: "SavedRun",
    vocab_size: int,
    path: str | None,
    chatml: bool,
    no_chatml: bool,
    eos_token: str | None,
) -> "TokenizerExport":
    from titan_loop.formats.tokenizer_export import open_tokenizer
    from titan_loop.text.tokenizer import load_tokenizer

    known = run.tokenizer(path)
    text = run.text_format(load_tokenizer(known.path))
    if chatml:
        text = text.with_chatml()
    elif no_chatml:
        text = text.without_chats()
    if eos_token is not None:
        text = replace(text, end_of_text=eos_token, end_tokens=())
    return open_tokenizer(known.path, vocab_size=vocab_size, text=text, is_known=known.is_known)


run = group("convert", {"import": import_, "export": export})
