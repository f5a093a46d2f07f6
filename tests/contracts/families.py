"""What the families promise: `tests/families/NAME/contract.py` fills in a `Contract` for a folder.

The suites of this folder run every case of every family that has a folder. A deleted family drops
out with its tests, and a new one fails `test_every_family_has_a_contract` until it has cases.
"""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import titan_loop.families
from tests.distributed.test_parity import Case
from tests.inference.reference import perturbed
from titan_loop.inference.exit_policy import ExitPolicy
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import ModelOptions, build_decoder
from titan_loop.training.trainer import LoopTrainer


class Compiled(NamedTuple):
    """A model whose compiled layers have the numbers of the eager ones.

    `graphs` is the number of graphs of two depths in training and evaluation, if it is asked for.
    """

    options: ModelOptions
    steps: int = 3
    graphs: int | None = None


class Generated(NamedTuple):
    """A model, R, and an exit policy by which its tokens leave at different steps."""

    options: ModelOptions
    leaves: ExitPolicy | None = None
    steps: int = 3


class Run(NamedTuple):
    """A training run that breaks off and is resumed.

    Attributes:
        config: Returns the run of a folder on a number of ranks; checkpoints are 2 steps apart.
        equal: Metrics that are equal in every digit.
        close: Metrics that are equal but for the order of sums.
        ranks: Pairs of ranks before and after.
    """

    config: Callable[[Path, int], LoopTrainer.Config]
    equal: Sequence[str] = ()
    close: Sequence[str] = ()
    ranks: Sequence[tuple[int, int]] = ((2, 1),)


class Folder(NamedTuple):
    """An exported format that is a folder, and models that it holds.

    Attributes:
        family: Name of the models' family.
        models: Options of models; the first one is asked for everything.
        comes_back: Whether `convert import` reads the same model.
        own_code: Whether the folder has code for transformers.
        ties: Whether embedding and head may be one matrix.
        transformers: Oldest major version of transformers that runs it; None if none does.
        refused: Changes of the first model's config.json that no import takes, and words of the
            refusal.
        unfit: Options and flags of exports that the format cannot hold, and words of the refusal.
    """

    family: str
    models: Sequence[Mapping[str, Any]]
    comes_back: bool = True
    own_code: bool = False
    ties: bool = True
    transformers: int | None = 4
    refused: Sequence[tuple[Mapping[str, Any], str]] = ()
    unfit: Sequence[tuple[Mapping[str, Any], Sequence[object], str]] = ()


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Cases of a family's folder, by name.

    Attributes:
        parity: What is trained on the layouts of `tests/distributed/test_parity.py`, which are
            named after it.
        rehearsed: Changes of a rehearsed stage.
        refused: Options that make no model, and words of the refusal.
    """

    parity: Mapping[str, tuple[Case, str]] = field(default_factory=dict)
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    generated: Mapping[str, Generated] = field(default_factory=dict)
    rehearsed: Mapping[str, Callable[[LoopTrainer.Config], None]] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)
    folders: Mapping[str, Folder] = field(default_factory=dict)
    refused: Sequence[tuple[ModelOptions, str]] = ()

    def options(self) -> Iterator[ModelOptions]:
        """Yield the options of all models that the cases have."""
        yield from (case.model for case, _ in self.parity.values())
        yield from (case.options for case in self.compiled.values())
        yield from (case.options for case in self.generated.values())


@cache
def contracts() -> dict[str, Contract]:
    """Return folder of a family, or llama → its contract, which may import this module."""
    folders = [folder.name for folder in pkgutil.iter_modules(titan_loop.families.__path__)]
    places = {"llama": "tests.models", **{name: f"tests.families.{name}" for name in folders}}
    return {
        name: importlib.import_module(f"{place}.contract").CONTRACT
        for name, place in places.items()
    }


def cases(kind: str) -> dict[str, Any]:
    """Return the cases of one kind of all families, named FOLDER/CASE."""
    return {
        f"{folder}/{name}": case
        for folder, contract in contracts().items()
        for name, case in getattr(contract, kind).items()
    }


def random_model(options: ModelOptions, window: int) -> LoopDecoder:
    """Return a model in float64 that has left its initial point."""
    torch.manual_seed(0)
    return perturbed(build_decoder(options, max_seq_len=window)).double()


def as_json(value: Any) -> Any:
    """Return what a file keeps of a value."""
    return json.loads(json.dumps(value))
