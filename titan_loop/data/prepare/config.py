"""The TOML file that switches on cleaning and describes a cluster; `README.md` shows one."""

import importlib
import inspect
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from titan_loop.errors import UserError, nearest

T = TypeVar("T")
Executor = Literal["local", "slurm", "ray"]
EXECUTORS: tuple[str, ...] = get_args(Executor)

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

    def text_norm(self) -> Any:
        """Return datatrove's configuration."""
        from datatrove.utils.text import TextNormConfig

        return TextNormConfig(
            norm_numbers=self.norm_numbers, remove_punctuation=self.remove_punctuation
        )


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

    tasks: list[str]
    n_grams: int = 12
    query_ngrams: bool = True
    include_path: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """The file's tables; an absent one is switched off."""

    language: str = "eng"
    quality: dict[str, dict[str, Any]] = field(default_factory=dict)
    minhash: Minhash | None = None
    decontaminate: Decontamination | None = None
    slurm: dict[str, Any] = field(default_factory=dict)
    ray: dict[str, Any] = field(default_factory=dict)

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
    _require_known(path, "", raw, [item.name for item in fields(PrepareConfig)])
    for name, value in raw.items():
        wanted = str if name == "language" else dict
        if not isinstance(value, wanted):
            raise UserError(f"config {path}: {name} = {value!r} must be a {wanted.__name__}")
    _require_known(path, "quality.", raw.get("quality", {}), QUALITY_FILTERS)
    for name, options in raw.get("quality", {}).items():
        if not isinstance(options, dict):
            raise UserError(f"config {path}: quality.{name} = {options!r} must be a table, as {{}}")
        signature = inspect.signature(quality_filter(name))
        defaults = {
            option: parameter.default
            for option, parameter in signature.parameters.items()
            if option not in ("exclusion_writer", "language")
        }
        _require_known(path, f"quality.{name}.", options, defaults)
        _require_types(path, f"quality.{name}", options, defaults)
    if "minhash" in raw:
        raw["minhash"] = _read_table(path, "minhash", raw["minhash"], Minhash)
    if "decontaminate" in raw:
        tasks = raw["decontaminate"].get("tasks")
        if not isinstance(tasks, list) or not tasks or not all(isinstance(t, str) for t in tasks):
            raise UserError(f"config {path}: decontaminate.tasks={tasks!r} must be a list of names")
        table = raw["decontaminate"]
        raw["decontaminate"] = _read_table(path, "decontaminate", table, Decontamination)
    config = PrepareConfig(**raw)
    if config.cleaning():
        from datatrove.utils.word_tokenizers import load_tokenizer_assignments

        known = load_tokenizer_assignments()
        if config.language not in known:
            raise UserError(
                f"config {path}: language = {config.language!r} is not a language that datatrove "
                f"splits into words{nearest(config.language, known)}"
            )
    return config


def hash_config() -> Any:
    """Return the n-gram hash of deduplication and decontamination."""
    from datatrove.utils.hashing import HashConfig

    # datatrove's default hands strings to xxhash, whose version 4 takes only bytes.
    return HashConfig(precision=64, hash_fc="sha1")


def quality_filter(name: str) -> type:
    """Return datatrove's class of this name."""
    module, class_name = QUALITY_FILTERS[name]
    return getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), class_name)


def _read_table(path: str | Path, name: str, table: Mapping[str, Any], cls: type[T]) -> T:
    """Return a table as a dataclass, whose whole numbers must all be positive."""
    defaults = {item.name: item.default for item in fields(cls)}  # pyright: ignore
    _require_known(path, f"{name}.", table, defaults)
    whole = [key for key, default in defaults.items() if type(default) is int]
    _require_positive(path, name, {key: table[key] for key in whole if key in table})
    _require_types(path, name, table, {**defaults, "tasks": [], "include_path": ""})
    return cls(**table)


def _require_known(
    path: str | Path, prefix: str, table: Mapping[str, Any], known: Collection[str]
) -> None:
    for name in table:
        if name not in known:
            raise UserError(f"config {path}: unknown name {prefix}{name}{nearest(name, known)}")


def _require_types(
    path: str | Path, prefix: str, table: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Refuse values of another kind than the default; a default of None allows any."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a string"}
    for name, value in table.items():
        default = defaults.get(name)
        kind = kinds.get(type(default), "a list")
        if default is not None and kinds.get(type(value), "a list") != kind:
            raise UserError(f"config {path}: {prefix}.{name} = {value!r} must be {kind}")


def _require_positive(path: str | Path, prefix: str, table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"config {path}: {prefix}.{name} = {value!r} must be a positive whole number"
            )
