"""A family of looped models as a record, and the look-up of a family by its name.

    --model.…, config.json ─► ModelOptions ─► Family.decoder_config ─► LoopDecoder.Config

The class of a recipe's model options names the family; `titan_loop/plugins.py` finds it by that
name. Other modules never compare names: they ask the `Family`, the decoder or its config.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import torch
import tyro
from annotated_types import Ge

from titan_loop.bounds import bound_refusals
from titan_loop.errors import UserError, nearest, raise_first, require_known
from titan_loop.models.attention import AttentionBackend
from titan_loop.models.decoder import LoopDecoder
from titan_loop.plugins import find, names

FamilyName = Annotated[str, tyro.conf.Suppress]
"""Type of the field `family` of model options, which is recorded but is not a flag."""

Use = Literal["analyse", "export", "generate", "held_out", "upcycle"]
"""What a family may not support: the commands of these names, and scoring held-out text."""

USES: frozenset[Use] = frozenset(get_args(Use))

_RESOLVED = {"size", "recurrent_steps"}
OF_A_START = {"attention", "readout_chunk_tokens", "dropout", "embedding_dropout"}
"""Options that belong to a start: they change no result, or training alone."""

_INITIAL_WEIGHTS = {
    "base_width",
    "initializer_range",
    "initial_keys",
    "residual_scale",
}
RUNTIME_OPTIONS = frozenset(_RESOLVED | OF_A_START | _INITIAL_WEIGHTS)
"""Options in which two models of one checkpoint may differ."""

RETIRED_OPTIONS = frozenset({"base_layers", "early_states", "initial_outputs"})
"""Options of training alone that earlier versions recorded."""


@dataclass(frozen=True)
class ModelSize:
    """One size: width D, unique layers, query and key-value heads, F and vocabulary."""

    dim: int
    n_layers: int
    n_heads: int
    hidden_dim: int
    vocab_size: int
    recurrent_steps: int = 4
    n_kv_heads: int | None = None


@dataclass(kw_only=True, slots=True)
class ModelOptions:
    """Options of every family's models; a family's own class adds more."""

    retired: ClassVar[Mapping[str, Any]] = {}
    """Options that earlier versions recorded, with the one value that models still have."""

    family: FamilyName = field(default="", init=False)
    """Name of the family; it follows from the class."""

    size: str = "debugmodel"
    """Named size of the family, see its folder in `titan_loop/families/`."""

    vocab_size: Annotated[int | None, Ge(1)] = None
    """Rows of embedding and head; None takes the data's vocabulary, without data the size's own."""

    recurrent_steps: Annotated[int | None, Ge(1)] = None
    """R the model is built with; None takes the size's own. In training a schedule sets R."""

    n_layers: Annotated[int | None, Ge(1)] = None
    """Unique layers; None takes the size's own."""

    dim: Annotated[int | None, Ge(1)] = None
    """Width D; None takes the size's own. hidden_dim and the number of heads do not follow it."""

    n_heads: Annotated[int | None, Ge(1)] = None
    """Query heads; None takes the size's own."""

    n_kv_heads: Annotated[int | None, Ge(1)] = None
    """Key-value heads; None takes the size's own, by default as many as query heads."""

    hidden_dim: Annotated[int | None, Ge(1)] = None
    """Feed-forward width F; None takes the size's own."""

    exit_gate: bool = True
    """Whether there is an exit gate; without one the loss is the last step's."""

    tie_weights: bool = False
    """Whether embedding and head share one matrix."""

    attention: AttentionBackend = "auto"
    """sdpa, flex, varlen, or auto: Flex on CUDA and SDPA elsewhere."""

    readout_chunk_tokens: Annotated[int | None, Ge(1)] = None
    """Tokens read out at a time in the loss; None takes `LMHead`'s default."""

    def canonical(self) -> dict[str, Any]:
        """Return values of open options, and of others that equal models share; sizes are known."""
        return {}

    def check_heads(self, shape: ModelSize) -> None:
        """Raise `UserError` if the heads do not divide D into even widths."""
        if shape.dim % shape.n_heads or (shape.dim // shape.n_heads) % 2:
            dim = f"model.dim={shape.dim}"
            heads = f"model.n_heads={shape.n_heads}"
            raise UserError(f"{heads} must divide {dim} into even head widths")

    def reader_of_steps(self) -> str:
        """Return the set option that depends on `recurrent_steps`, with its value; "" for none."""
        return ""

    def implied(self) -> Mapping[str, Any]:
        """Return entries of the record that are no options of the family, from canonical ones."""
        return {}


Options = TypeVar("Options", bound=ModelOptions)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of looped models.

    Attributes:
        decoder_config: Maps options, their shape and the longest window to the architecture.
        exit_policies: Names of those it supports; None for all that work on a loop over the stack.
        kv_caches: Names of the key-value caches that its models can decode with.
        runtime_options: Options in which two models of one checkpoint may differ.
        data_options: Options that are filled in from the data unless they are set.
    """

    name: str
    options: type[ModelOptions]
    sizes: Mapping[str, ModelSize]
    decoder_config: Callable[[Any, ModelSize, int], LoopDecoder.Config]
    uses: frozenset[Use] = USES
    exit_policies: frozenset[str] | None = None
    kv_caches: frozenset[str] = frozenset({"full", "last", "first", "averaged"})
    runtime_options: frozenset[str] = RUNTIME_OPTIONS
    data_options: frozenset[str] = frozenset({"vocab_size"})

    def size(self, name: str) -> ModelSize:
        """Return the named size; raises `UserError` with the nearest names if it is unknown."""
        require_known("model.size", name, self.sizes)
        return self.sizes[name]

    def require(self, use: Use) -> None:
        """Raise `UserError` if models of this family do not support the use."""
        if use not in self.uses:
            does = ", ".join(sorted(self.uses)) or "training"
            raise UserError(f"model.family={self.name} does not support {use}, only {does}")


def get_family(name: str) -> Family:
    """Return a family; raises `UserError` if there is none of this name."""
    family = find("families", name)
    if family is None:
        known = nearest(name, names("families"))
        fix = "a family of your own is found through TITAN_LOOP_PLUGINS"
        raise UserError(f"model.family={name} is unknown{known}; {fix}")
    assert family.name == family.options().family == name, f"{name} calls itself {family.name}"
    return family


def without_retired(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded options of a model without those that it has no choice of any more."""
    retired = get_family(str(recorded.get("family", ""))).options.retired
    return {
        name: value
        for name, value in recorded.items()
        if name not in retired or retired[name] != value
    }


def read_options(recorded: Mapping[str, Any]) -> ModelOptions:
    """Return the options that `config.json` recorded; all must be known to this version."""
    values = without_retired(recorded)
    family = get_family(str(values.pop("family", "")))
    known = {option.name for option in fields(family.options)}
    values = {name: value for name, value in values.items() if name not in RETIRED_OPTIONS}
    if unknown := [f"model.{name}={value}" for name, value in values.items() if name not in known]:
        problem = f"{', '.join(unknown)}: family {family.name} has no such option in this version"
        raise UserError(f"{problem}; use the version of titan_loop that wrote it")
    for name, value in values.items():
        if isinstance(value, list):  # a file has no tuples
            values[name] = tuple(value)
    return family.options(**values)


def resolved_shape(options: ModelOptions) -> ModelSize:
    """Return the named size, overridden by the options, or raise their first refusal.

    No number is open: without `n_kv_heads` there are as many as query heads.
    """
    raise_first(bound_refusals("model", options))
    size = get_family(options.family).size(options.size)
    asked = {option.name: getattr(options, option.name) for option in fields(ModelSize)}
    values = asdict(size) | {name: value for name, value in asked.items() if value is not None}
    shape = ModelSize(**values)
    options.check_heads(shape)
    kv_heads = shape.n_kv_heads or shape.n_heads
    if shape.n_heads % kv_heads:
        raise UserError(f"model.n_kv_heads={kv_heads} must divide model.n_heads={shape.n_heads}")
    return replace(shape, n_kv_heads=kv_heads)


def resolved(options: Options) -> Options:
    """Return the options with nothing left open; models are equal if these are."""
    sized = replace(options, **asdict(resolved_shape(options)))
    return replace(sized, **sized.canonical())


def decoder_config(options: ModelOptions, *, max_seq_len: int) -> LoopDecoder.Config:
    """Build the architecture of `options`; raises `UserError` where they do not fit together."""
    family, options = get_family(options.family), resolved(options)
    config = family.decoder_config(options, resolved_shape(options), max_seq_len)
    config.architecture = _record(family, options)
    return config


def _record(family: Family, options: ModelOptions) -> dict[str, Any]:
    """Return what two models must agree on to share a checkpoint: all options but runtime ones.

    A key that a checkpoint lacks has the value of the family's default model, so the default of a
    new option must keep the old behaviour.
    """
    values = {option.name: getattr(options, option.name) for option in fields(options)}
    values = {**options.implied(), **values}
    return {
        name: [*value] if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in family.runtime_options
    }


def completed_architecture(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's architecture record, with defaults for keys it was saved without."""
    family = get_family(str(recorded.get("family", "")))
    default = family.options(size=next(iter(family.sizes)), attention="sdpa")
    written_always = {size_field.name for size_field in fields(ModelSize)}
    known = decoder_config(default, max_seq_len=1).architecture
    absent = {name: value for name, value in known.items() if name not in written_always}
    return {**absent, **without_retired(recorded)}


def require_usual(options: ModelOptions, names: Iterable[str], problem: str) -> None:
    """Raise `UserError` for an option that differs from its default; `problem` says why not."""
    usual = type(options)()
    for name in names:
        value, wanted = getattr(options, name), getattr(usual, name)
        if value != wanted:
            raise UserError(f"model.{name}={value} {problem}; leave it at {wanted}")


def build_decoder(
    options: ModelOptions, *, max_seq_len: int, device: str | torch.device = "cpu"
) -> LoopDecoder:
    """Build and initialise one undistributed decoder; on "meta" it stays uninitialised."""
    with torch.device(device):
        model = decoder_config(options, max_seq_len=max_seq_len).build()
    if torch.device(device).type != "meta":
        with torch.no_grad():
            model.init_states()
    return model


def size_notes(asked: ModelOptions, vocab_size: int) -> Iterator[str]:
    """Yield facts about a run's model that its options do not show."""
    if asked.vocab_size is None:
        yield f"model.vocab_size={vocab_size}, the vocabulary of the data"
    family = get_family(asked.family)
    own = family.size(asked.size)
    model = replace(asked, vocab_size=vocab_size)
    here = resolved_shape(model)
    asked_for, named = asdict(here), asdict(replace(own, n_kv_heads=own.n_kv_heads or own.n_heads))
    differing = [
        f"{name}={value} instead of {named[name]}"
        for name, value in asked_for.items()
        if name != "recurrent_steps" and value != named[name]
    ]
    if differing:
        # Other options may not fit the named size: a prelude may be longer than its layers.
        ours = _parameters(model)
        theirs = _named_parameters(family.options, asked.size, tie_weights=asked.tie_weights)
        counts = f"has {ours:,} parameters here, and {theirs:,} as named"
        yield f"model.size={asked.size} {counts}: {', '.join(differing)}"


@cache  # stages of a recipe share their size
def _named_parameters(options: type[ModelOptions], size: str, *, tie_weights: bool) -> int:
    return _parameters(options(size=size, tie_weights=tie_weights))


def _parameters(options: ModelOptions) -> int:
    model = build_decoder(options, max_seq_len=2, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())
