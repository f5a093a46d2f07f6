"""A run that passed the preflight, with the fields that training derives; it does not change.

The user's config is never written to. torchtitan's trainer reads more fields than a user sets, and
changes some, so it gets a copy of its own (`for_upstream`).
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
from torchtitan.protocols.model_spec import ModelSpec

from titan_loop.distributed.float8 import in_float8
from titan_loop.distributed.parallelize import parallelize_loop_decoder
from titan_loop.errors import raise_first
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions
from titan_loop.storage.json_files import json_sha256
from titan_loop.training.chosen_model import saved_architecture
from titan_loop.training.config import RunConfig, TokenLearningRate
from titan_loop.training.flop_budget import within_budget
from titan_loop.training.preflight import examined


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run that can be trained, from `resolve`; neither config nor architecture may be changed.

    `config` is a copy of the user's in which the model's unset options, `model_spec`, `optimizer`
    and `lr_scheduler` are filled in, and a budget in FLOPs has set the number of tokens. `asked`
    are the model's options without what was filled in.
    """

    config: RunConfig
    model: LoopDecoder.Config
    asked: ModelOptions

    @property
    def architecture(self) -> dict[str, Any]:
        """The architecture record; models with equal records can exchange their weights."""
        return self.model.architecture

    def recipe_sha256(self) -> str:
        """Return the SHA-256 of the config without fields of a single start, such as its folder."""
        record = self.config.to_dict()
        del record["dump_folder"], record["dataloader"]["accept_change"]
        del record["checkpoint"]["carry"]["parent"], record["checkpoint"]["load_step"]
        del record["training"]["steps"]
        return json_sha256(record)

    def sha256(self) -> str:
        """Return the SHA-256 of the whole config and the architecture."""
        return json_sha256({"config": self.config.to_dict(), "model": self.architecture})

    def for_upstream(self) -> RunConfig:
        """Return a copy for torchtitan's trainer, which writes placements into the model."""
        return _copied(self.config)


def resolve(
    config: RunConfig, world_size: int, saved: Mapping[str, Any] | None = None
) -> ResolvedRun:
    """Return the run that `config` means on `world_size` ranks, or raise the first refusal.

    Touches neither a process group nor a device, and leaves `config` as it is. `saved` is from
    `saved_architecture`; None reads it.
    """
    config = within_budget(config)
    saved = saved_architecture(config) if saved is None else saved
    found, chosen = examined(config, world_size, saved)
    raise_first(found)
    assert chosen is not None
    config, model = _copied(config), chosen.config
    asked, config.model = config.model, chosen.options
    spread = partial(
        parallelize_loop_decoder,
        fsdp=config.fsdp,
        trainable=config.trainable,
        graphs=config.compile.graphs,
    )
    unused = dict.fromkeys(("pipelining_fn", "post_optimizer_build_fn", "state_dict_adapter"))
    built = model if config.float8 == "off" else in_float8(model, config.float8)
    config.model_spec = ModelSpec(
        name="loop", flavor=config.model.size, model=built, parallelize_fn=spread, **unused
    )
    chosen = config.optimizers()[config.optimizer.name]
    derived = {"chosen": chosen, "rest": config.adamw, "ema": config.ema}
    config.optimizer = replace(config.optimizer, **derived)
    config.lr_scheduler = TokenLearningRate(schedule=config.learning_rate)
    return ResolvedRun(config=config, model=model, asked=asked)


def _copied(config: RunConfig) -> RunConfig:
    # Callbacks may hold objects that cannot be copied, so both configs share them.
    return replace(deepcopy(replace(config, callbacks=())), callbacks=config.callbacks)
