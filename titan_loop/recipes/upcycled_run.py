"""A run directory that begins with the upcycled checkpoint of another run.

Training and evaluation take it like any other: the configuration is the parent's with the new
number of layers, and the step and token counters go on.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from titan_loop.checkpoint.architecture import architecture, check_architecture
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.checkpoint.upcycling import Upcycling, upcycle_checkpoint
from titan_loop.inference.loading import find_checkpoint
from titan_loop.models.sizes import ModelOptions, decoder_config
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.staged_folder import staged_folder


def upcycle_run(
    parent: Path, output: Path, upcycling: Upcycling, command: Sequence[str]
) -> tuple[Path, Path]:
    """Write a new run whose one checkpoint is the upcycled parent; whole, or not at all.

    Args:
        parent: A run, whose newest checkpoint is taken, or one of its checkpoints.
        output: The new run directory.
        upcycling: How.
        command: Recorded in the new `run.json`.

    Returns:
        The parent checkpoint and the new one.

    Raises:
        UserError: `output` is not empty, or `parent` is missing, damaged, of another architecture
            than its config says, or has layers that do not fit.
    """
    source, run = find_checkpoint(parent)
    config = RunDirectory(run).read_config()
    saved = read_manifest(source)["trainer"]["architecture"]
    known = {field.name for field in fields(ModelOptions)}
    options = {name: value for name, value in config["model"].items() if name in known}
    check_architecture(saved, architecture(decoder_config(ModelOptions(**options), max_seq_len=1)))
    upcycling.sources(saved["n_layers"])  # before any file is read
    config["dump_folder"] = str(output)
    config["model"]["n_layers"] = upcycling.n_layers
    checkpoint = Path(config["checkpoint"]["folder"]) / source.name
    with staged_folder(output) as staged:
        upcycle_checkpoint(source, staged / checkpoint, upcycling)
        RunDirectory(staged).create_or_open(command, config=config)
    return source, output / checkpoint
