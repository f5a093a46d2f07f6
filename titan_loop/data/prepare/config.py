"""The TOML file that switches on cleaning and describes a cluster; `README.md` shows one."""

import importlib
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from titan_loop.errors import UserError, nearest

Executor = Literal["local", "slurm"]

QUALITY_FILTERS = {
    "gopher_quality": ("gopher_quality_filter", "GopherQualityFilter"),
    "gopher_repetition": ("gopher_repetition_filter", "GopherRepetitionFilter"),
    "fineweb_quality": ("fineweb_quality_filter", "FineWebQualityFilter"),
    "c4_quality": ("c4_filters", "C4QualityFilter"),
}
"""Our name of each of datatrove's filters → its module and class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The texts that count as equal, apart from case, white space and diacritics.

    datatrove's own defaults make one text of all sums and, nearly, of all functions.

    Attributes:
        norm_numbers: Whether every number counts as 0.
        remove_punctuation: Whether punctuation and operators do not count.
    """

    norm_numbers: bool = False
    remove_punctuation: bool = False

    def for_datatrove(self) -> dict[str, Any]:
        """Return datatrove's settings of this comparison."""
        from datatrove.utils.hashing import HashConfig
        from datatrove.utils.text import TextNormConfig

        return {
            "norm_config": TextNormConfig(
                norm_numbers=self.norm_numbers, remove_punctuation=self.remove_punctuation
            ),
            # datatrove's default hands strings to xxhash, whose version 4 takes only bytes.
            "hash_config": HashConfig(precision=64, hash_fc="sha1"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Minhash(Comparison):
    """The similarity of near-duplicates, as in datatrove's `MinhashConfig`."""

    n_grams: int = 5
    num_buckets: int = 14
    hashes_per_bucket: int = 8
    seed: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Decontamination(Comparison):
    """The evaluations that a document must not share n-grams with.

    Attributes:
        query_ngrams: Whether a question without its answer is enough to remove a document.
        include_path: Folder with tasks of your own.
    """

    tasks: list[str] = field(default_factory=list)
    n_grams: int = 12
    query_ngrams: bool = True
    include_path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """The file's tables; an absent one is switched off."""

    language: str = "eng"
    quality: dict[str, dict[str, Any]] = field(default_factory=dict)
    minhash: Minhash | None = None
    decontaminate: Decontamination | None = None
    slurm: dict[str, Any] = field(default_factory=dict)

    def cleaning(self) -> dict[str, Any]:
        """Return the settings that drop documents; empty if nothing is switched on."""
        every = asdict(self)
        off = {"quality": {}, "minhash": None, "decontaminate": None}
        chosen = {name: every[name] for name in off if every[name] != off[name]}
        return {"language": self.language, **chosen} if chosen else {}


def read_prepare_config(path: str | Path | None) -> PrepareConfig:
    """Read the file; None gives the defaults, in which nothing is switched on."""
    if path is None:
        return PrepareConfig()
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path} cannot be read ({error.strerror})") from error
    except ValueError as error:  # also tomllib.TOMLDecodeError and UnicodeDecodeError
        raise UserError(f"config {path} is not TOML ({error})") from error
    called = f"config {path}: "
    tables: dict[str, Any] = {"quality": {}, "minhash": {}, "decontaminate": {}, "slurm": {}}
    _check(called, raw, {"language": "", **tables})
    quality = raw.get("quality", {})
    _check(f"{called}quality.", quality, {name: {} for name in QUALITY_FILTERS})
    for name, options in quality.items():
        parameters = inspect.signature(quality_filter(name)).parameters.values()
        ours = ("exclusion_writer", "language")
        known = {each.name: each.default for each in parameters if each.name not in ours}
        _check(f"{called}quality.{name}.", options, known)
    for name, kind in (("minhash", Minhash), ("decontaminate", Decontamination)):
        if name in raw:
            least = {"seed": 0, "n_grams": 1, "num_buckets": 1, "hashes_per_bucket": 1}
            _check(f"{called}{name}.", raw[name], asdict(kind()), least)
            raw[name] = kind(**raw[name])
    arguments: dict[str, Any] = {"sbatch_args": {}, "srun_args": {}}
    given = {name: raw["slurm"][name] for name in arguments.keys() & raw.get("slurm", {}).keys()}
    _check(f"{called}slurm.", given, arguments)
    config = PrepareConfig(**raw)
    index = config.decontaminate
    if index is not None and not (index.tasks and all(isinstance(n, str) for n in index.tasks)):
        raise UserError(f"{called}decontaminate.tasks={index.tasks} must be a list of names")
    if config.cleaning():
        from datatrove.utils.word_tokenizers import load_tokenizer_assignments

        languages = load_tokenizer_assignments()
        if config.language not in languages:
            raise UserError(
                f"{called}language = {config.language!r} is not a language that datatrove splits "
                f"into words{nearest(config.language, languages)}"
            )
    return config


def quality_filter(name: str) -> type:
    """Return datatrove's class of this name."""
    module, class_name = QUALITY_FILTERS[name]
    return getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), class_name)


_KINDS: dict[type, str] = {
    **{bool: "true or false", int: "a number", float: "a number", str: "a string"},
    **{dict: "a table", list: "a list", tuple: "a list"},
}


def _check(
    called: str,
    table: Mapping[str, Any],
    defaults: Mapping[str, Any],
    least: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Refuse unknown names, other kinds than the default's, and numbers not from `least` on."""
    for name, value in table.items():
        if name not in defaults:
            prefix, own = called.rsplit(" ", 1)
            raise UserError(f"{prefix} unknown name {own}{name}{nearest(name, defaults)}")
        kind = _KINDS.get(type(defaults[name]))
        if kind is not None and _KINDS.get(type(value)) != kind:
            raise UserError(f"{called}{name} = {value!r} must be {kind}")
        if name in least and (type(value) is not int or value < least[name]):
            at_least = f"must be a whole number of at least {least[name]}"
            raise UserError(f"{called}{name} = {value!r} {at_least}")
