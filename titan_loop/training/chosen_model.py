"""The model a run trains: its options, with what they leave open taken from data and weights."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, ModelSize, decoder_config, get_family
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.config import RunConfig


def model_config(config: RunConfig, saved: Mapping[str, Any] | None = None) -> LoopDecoder.Config:
    """Return the architecture a config names; arguments and errors as of `model_options`."""
    return decoder_config(model_options(config, saved), max_seq_len=config.training.seq_len)


def stage_architecture(config: RunConfig) -> LoopDecoder.Config:
    """Return the architecture of a stage; without prepared data its vocabulary is the default."""
    options = replace(config.model, attention="sdpa")  # its kernel need not be on this machine
    if options.vocab_size is None and are_prepared(config):
        options.vocab_size = config.dataloader.vocabulary().size
    return decoder_config(options, max_seq_len=config.training.seq_len)


def are_prepared(config: RunConfig) -> bool:
    """Return whether a run's data are there."""
    return all(Path(path).is_dir() for path in config.dataloader.source_paths())


def model_options(config: RunConfig, saved: Mapping[str, Any] | None = None) -> ModelOptions:
    """Return a run's model options with what it leaves open.

    The vocabulary is that of the data. What shapes no tensor, such as the RoPE base, is that of the
    run's own checkpoint, else of its parent, else the family's default.

    Args:
        config: The run.
        saved: From `saved_architecture`; None looks for it.

    Raises:
        UserError: Unknown size, a shape that does not fit together, or data that cannot be opened.
    """
    options = config.model
    unknown = [n for n in get_family(options.family).data_options if getattr(options, n) is None]
    if unknown:
        vocabulary = config.dataloader.vocabulary()
        found = {"vocab_size": vocabulary.size, **vocabulary.options}
        options = replace(options, **{name: found[name] for name in unknown if name in found})
    shaping = {field.name for field in fields(ModelSize)}
    known = decoder_config(options, max_seq_len=config.training.seq_len).architecture()
    saved = {**known, **(saved_architecture(config) if saved is None else saved)}
    left_open = (f.name for f in fields(options) if getattr(options, f.name) is None)
    return replace(
        options,
        **{name: saved[name] for name in left_open if name in saved and name not in shaping},
    )


def saved_architecture(config: RunConfig) -> Mapping[str, Any]:
    """Return the architecture of the weights that a run goes on with or starts from; {} if none.

    Ranks that each look may see different files: let rank 0 look for all of them.

    Raises:
        RunFailedError: A disk fails, which says nothing about the weights.
        OSError: The same.
    """
    folder, carry = RunDirectory(config.dump_folder).checkpoints, config.checkpoint.carry
    try:
        newest = newest_good(folder, look_at="manifest") if config.checkpoint.enable else None
        if newest is not None:
            return newest[1]["trainer"]["architecture"]
        if carry.parent:
            return read_manifest(carry.find_parent())["trainer"]["architecture"]
    except UserError:
        pass  # the checks of checkpoints and folders say it; a recipe's parent may be to come
    return {}
