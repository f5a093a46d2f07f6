"""The model that a run trains: its options, with open ones filled in from data and weights."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import titan_loop.compat  # noqa: F401  (before any torchtitan module)

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.manifest import read_manifest
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, ModelSize, decoder_config, get_family, resolved
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.training.config import RunConfig

Newest: TypeAlias = Callable[[], tuple[int, dict[str, Any]] | None]
"""Reads a run's newest checkpoint once; returns its step and manifest. Errors as in
`newest_good`."""


class ChosenModel(NamedTuple):
    """A run's model options with nothing left open, and their architecture."""

    options: ModelOptions
    config: LoopDecoder.Config


def chosen_model(config: RunConfig, saved: Mapping[str, Any]) -> ChosenModel:
    """Return the model that a config names; `saved` is from `saved_architecture`.

    An unset vocabulary is the data's. Unset options that shape no tensor, such as the RoPE base,
    come from the run's own checkpoint, else from its parent, else from the family's defaults.
    """
    options = config.model
    unknown = [n for n in get_family(options.family).data_options if getattr(options, n) is None]
    if unknown:
        vocabulary = config.dataloader.vocabulary()
        found = {"vocab_size": vocabulary.size, **vocabulary.options}
        options = replace(options, **{name: found[name] for name in unknown if name in found})
    default = resolved(options)
    shaping = {field.name for field in fields(ModelSize)}
    left_open = {f.name for f in fields(options) if getattr(options, f.name) is None} - shaping
    taken = {name: saved.get(name, getattr(default, name)) for name in left_open}
    options = replace(options, **taken)
    return ChosenModel(options, decoder_config(options, max_seq_len=config.training.seq_len))


def stage_architecture(config: RunConfig) -> LoopDecoder.Config:
    """Return the architecture of a stage; without prepared data its vocabulary is the default."""
    options = replace(config.model, attention="sdpa")  # the chosen kernel may be missing here
    if options.vocab_size is None and are_prepared(config):
        options.vocab_size = config.dataloader.vocabulary().size
    return decoder_config(options, max_seq_len=config.training.seq_len)


def are_prepared(config: RunConfig) -> bool:
    """Return whether the folders of a run's data exist."""
    return all(Path(path).is_dir() for path in config.dataloader.source_paths())


def newest_of(config: RunConfig) -> Newest:
    """Return a function that reads a run's newest checkpoint when it is first called."""
    folder = RunDirectory(config.dump_folder).checkpoints
    return cache(partial(newest_good, folder, look_at="manifest"))


def saved_architecture(config: RunConfig, newest: Newest | None = None) -> Mapping[str, Any]:
    """Return the architecture of the weights that a run starts or continues from; {} without any.

    Only rank 0 should call it: ranks may see different files. `newest` is from `newest_of`; None
    reads the checkpoint again.
    """
    carry = config.checkpoint.carry
    try:
        found = (newest or newest_of(config))() if config.checkpoint.enable else None
        if found is not None:
            return found[1]["trainer"]["architecture"]
        if carry.parent:
            return read_manifest(carry.find_parent())["trainer"]["architecture"]
    except UserError:
        pass  # later checks report it, and a recipe's parent may not exist yet
    return {}
