"""`titan-loop train RECIPE --help`: the flags that matter first, `--help-all` for every one.

torchtitan's fields that do nothing here, or nothing but lead back to a refusal, are not flags.
"""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import tyro

from titan_loop.training.schedule import Schedule

FIRST = {
    "run": ("dump-folder", "total-tokens", "training.steps", "accept-change", "debug.seed"),
    "data": ("dataloader.mixture", "dataloader.seed", "training.seq-len"),
    "model": ("model.size", "model.n-layers", "model.dim", "recurrence.steps"),
    "training": (
        "learning-rate",
        "batch.global-batch-tokens",
        "training.local-batch-size",
        "entropy-weight",
        "adamw.weight-decay",
    ),
    "evaluation and checkpoints": (
        "held-out.interval",
        "best",
        "metrics.log-freq",
        "checkpoint.interval",
        "checkpoint.keep-latest-k",
    ),
    "many devices": (
        "parallelism.tensor-parallel-degree",
        "parallelism.context-parallel-degree",
        "compile.enable",
    ),
}
"""Flags of `--help`, by what they are about."""

WITHOUT_EFFECT = {
    "--parallelism.pipeline-parallel": "a loop over layers cannot be cut into a pipeline",
    "--parallelism.module-fqns-per-model-part": "a loop over layers cannot be cut into a pipeline",
    "--parallelism.expert-parallel": "there are no experts",
    "--debug.moe-": "there are no experts",
    "--checkpoint.initial-load": "start from a model with --from or --checkpoint.carry.parent",
    "--checkpoint.last-save": "titan-loop convert export writes Hugging Face folders",
    "--training.global-batch-size": "set --batch.global-batch-tokens",
}
"""Beginnings of flags that torchtitan has and nothing here follows, and why."""

HERE = {
    "--dump-folder": "Folder of the run; in a recipe's, every stage has one of its own.",
    "--training.steps": "Step at which this start ends before its tokens do, for a later start to "
    "go on from; 0 for none.",
    "--training.seq-len": "Tokens of a training window.",
    "--training.local-batch-size": "Windows that a rank computes at a time; a step accumulates the "
    "gradients of as many such batches as the global batch needs.",
    "--metrics.log-freq": "Steps between two progress lines.",
}
"""Texts of flags whose own speak of what is different here, or to readers of the code."""


class Flag(NamedTuple):
    """A field of a config as a flag.

    Attributes:
        name: The flag, with its dashes.
        kind: Type of the field, with annotations.
        value: Default.
        text: Help, in one paragraph.
    """

    name: str
    kind: Any
    value: Any
    text: str


def flags_of(config: Any, prefix: str = "--") -> Iterator[Flag]:
    """Yield the flags of a config, those of nested fields included."""
    hints = get_type_hints(type(config), include_extras=True)
    texts = _attribute_texts(type(config))
    for field in fields(config):
        name, kind = prefix + field.name.replace("_", "-"), hints[field.name]
        marks = getattr(kind, "__metadata__", ())
        if not field.init or tyro.conf.Suppress in marks:
            continue
        if name.startswith(tuple(WITHOUT_EFFECT)):
            continue
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, (type, Schedule)):
            nameless = any(getattr(mark, "name", None) == "" for mark in marks)  # to tyro
            yield from flags_of(value, prefix if nameless else f"{name}.")
        else:
            yield Flag(name, kind, value, HERE.get(name) or texts.get(field.name, ""))


def help_text(config: Any, program: str, choices: Sequence[str], *, everything: bool) -> str:
    """Return the help page of a config's flags.

    Args:
        config: The recipe's config, whose values are the defaults shown.
        program: Command that is explained.
        choices: Choices that follow the flags, with flags of their own.
        everything: Whether to list all flags instead of the first ones.
    """
    known = {flag.name: flag for flag in flags_of(config)}
    lines = [f"usage: {program} [FLAGS] [CHOICE]", ""]
    if everything:
        groups: dict[str, list[Flag]] = {}
        kinds = {"--" + choice.partition(":")[0] for choice in choices}
        for flag in (flag for flag in known.values() if flag.name not in kinds):
            groups.setdefault(flag.name[2:].rpartition(".")[0] or "run", []).append(flag)
    else:
        groups = {
            title: [known[f"--{name}"] for name in names if f"--{name}" in known]
            for title, names in FIRST.items()
        }
    for title, flags in groups.items():
        lines += [f"{title}:", *(line for flag in flags for line in _lines(flag)), ""]
    if choices:
        lines += [f"choices, each with a --help of its own: {', '.join(choices)}", ""]
    lines.append("Lists are separated by spaces or commas, token counts take K, M, B and T.")
    if not everything:
        lines.append(f"{program} --help-all lists all {len(known)} flags.")
    return "\n".join(lines)


def _lines(flag: Flag) -> Iterator[str]:
    value = ",".join(map(str, flag.value)) if isinstance(flag.value, list) else flag.value
    default = "none" if value in (None, "") else str(value)
    yield f"  {flag.name} ({default})"
    yield from textwrap.wrap(flag.text, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)


@cache
def _attribute_texts(kind: type) -> dict[str, str]:
    """Return field → the string that follows it in the source of a dataclass or of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # made at run time
            continue
        (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        for node, after in itertools.pairwise(body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[node.target.id] = " ".join(str(after.value.value).split())
    return texts
