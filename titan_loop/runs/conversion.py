"""Run directories that are written, not trained: an upcycled run, or a merged one.

Each has one checkpoint and a `config.json`, so that commands take it like a trained run. It appears
whole or not at all.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from titan_loop.checkpoint.manifest import reference, untrained
from titan_loop.checkpoint.merging import checked_weights, merge_checkpoints
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.tensors import CheckpointReader, LazyTensor, write_checkpoint
from titan_loop.checkpoint.upcycling import Upcycling, upcycle_checkpoint, with_layers
from titan_loop.models.family import ModelOptions, decoder_config, get_family
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.staged_folder import staged_folder
from titan_loop.text.tokenizer import TOKENIZER_NAME


def upcycle_run(parent: Path, output: Path, upcycling: Upcycling, command: Sequence[str]) -> Path:
    """Write a new run with one checkpoint, the upcycled parent; return that checkpoint.

    The configuration is the parent's with the new number of layers, and steps and tokens go on from
    the parent's. Raises `UserError` if `output` is not empty, or the parent is unusable or unfit.
    """
    run = SavedRun.open(parent)
    source = run.checkpoint()
    saved = source.manifest["trainer"]["architecture"]
    check_architecture(saved, decoder_config(run.model_options, max_seq_len=1).architecture)
    get_family(run.model_options.family).require("upcycle")
    layers = upcycling.sources(saved)  # before any file is read
    config = {
        **run.config,
        "dump_folder": str(output),
        "dataloader": run.dataloader,
        "model": with_layers(run.config["model"], layers),
    }
    with written_run(output, config, command, tokenizer=run.path / TOKENIZER_NAME) as new:
        upcycle_checkpoint(source.path, new.checkpoint(source.step), upcycling)
    return RunDirectory(output).checkpoint(source.step)


def remade_run(
    parent: Path,
    output: Path,
    command: Sequence[str],
    *,
    options: Callable[[SavedRun, int], ModelOptions],
    entries: Callable[[CheckpointReader, ModelOptions], Mapping[str, LazyTensor]],
    how: Mapping[str, Any],
) -> Path:
    """Write a run of a model of another family, made of a parent's; return its only checkpoint.

    Args:
        parent: Run (its newest checkpoint is taken) or a checkpoint.
        options: Returns the new model's, of the parent and the R of its checkpoint.
        entries: Returns the new model's tensors, of the parent's checkpoint and the new options.
        how: Its lineage, beside the parent.

    Raises as `options` does, and if `output` is not empty or the checkpoint of another model.
    """
    run = SavedRun.open(parent)
    source = run.checkpoint()
    own = decoder_config(run.model_options, max_seq_len=1).architecture
    check_architecture(source.manifest["trainer"]["architecture"], own)
    new_options = options(run, source.recurrent_steps)
    architecture = decoder_config(new_options, max_seq_len=1).architecture
    config = {
        **run.config,
        "dump_folder": str(output),
        "dataloader": run.dataloader,
        "model": asdict(new_options),
    }
    content = untrained(
        source.recurrent_steps,
        architecture,
        data=source.manifest["data"],
        lineage={"parent": reference(source.path), **how},
    )
    with written_run(output, config, command, tokenizer=run.path / TOKENIZER_NAME) as new:
        tensors = entries(CheckpointReader(source.path), new_options)
        write_checkpoint(new.checkpoint(0), tensors, content)
    return RunDirectory(output).checkpoint(0)


def merge_runs(
    parents: Sequence[Path], output: Path, weights: Sequence[float], command: Sequence[str]
) -> Path:
    """Write a new run with one checkpoint, of step 0: the weighted mean of others.

    Model options, window, data and text format come from the first parent, so that the new run
    is evaluated on its held-out text. The tokenizers are not compared.
    """
    checked_weights(weights, len(parents))  # before any file is read
    runs = [SavedRun.open(parent) for parent in parents]
    sources = [run.checkpoint() for run in runs]
    first = runs[0]
    saved = sources[0].manifest["trainer"]["architecture"]
    check_architecture(saved, decoder_config(first.model_options, max_seq_len=1).architecture)
    config = {
        "total_tokens": 0,  # merging trains on none
        "model": first.config["model"],
        "training": {"seq_len": first.seq_len},
        "dataloader": first.dataloader,
        "text": first.config.get("text"),
    }
    paths = [source.path for source in sources]
    with written_run(output, config, command, tokenizer=first.path / TOKENIZER_NAME) as new:
        merge_checkpoints(paths, new.checkpoint(0), weights=weights)
    return RunDirectory(output).checkpoint(0)


def how_to_train(run: Path) -> str:
    """Return a line with the command that trains a converted run."""
    tokens = f", on text prepared with {run / TOKENIZER_NAME}"
    tokens = tokens if (run / TOKENIZER_NAME).exists() else ""
    return (
        f"To train it{tokens}: titan-loop train quickstart --from {quote(str(run))} "
        "--dataloader.mixture SOURCE=1 --learning-rate 1e-4 "
        f"--dump-folder {quote(f'{run}-trained')}"
    )


@contextmanager
def written_run(
    output: Path, config: Mapping[str, Any], command: Sequence[str], *, tokenizer: Path | None
) -> Iterator[RunDirectory]:
    """Yield a new run, to write its checkpoint into; it appears when the block ends well.

    `tokenizer` is copied if the file exists, as in an imported run.
    """
    with staged_folder(output) as staged:
        new = RunDirectory(staged)
        yield new
        if tokenizer is not None and tokenizer.is_file():
            shutil.copyfile(tokenizer, staged / TOKENIZER_NAME)
        new.create_or_open(command, config=config)
