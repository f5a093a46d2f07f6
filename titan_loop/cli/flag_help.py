"""The flags of a recipe: the page of the important ones, and the ones without an effect here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import tyro

from titan_loop.training.schedule import Schedule

FIRST = {
    "run": {
        "dump-folder": "folder of the run; each of several stages has a folder inside it",
        "total-tokens": "tokens to train on, all ranks together",
        "training.steps": "stop at this step (0: after the last token); a later start continues",
        "debug.seed": "seed of the initial weights and of random draws in training",
    },
    "data": {
        "dataloader.mixture": "sources and their weights, such as sources/my=1",
        "dataloader.seed": "seed of the order of windows",
        "dataloader.accept-change": "continue a run although its data changed",
        "training.seq-len": "tokens of a training window",
    },
    "model": {
        "model.size": "named size of the family",
        "model.n-layers": "unique layers",
        "model.dim": "width",
        "recurrence.steps": "recurrent steps R, a schedule over global tokens",
    },
    "training": {
        "learning-rate": "learning rate, a schedule over global tokens",
        "batch.global-batch-tokens": "tokens of a training step, a schedule over global tokens",
        "training.local-batch-size": "windows that a rank computes at a time",
        "entropy-weight": "weight of the exit entropy, a schedule over global tokens",
        "adamw.weight-decay": "weight decay of AdamW",
    },
    "evaluation and checkpoints": {
        "held-out.interval": "steps between two evaluations on held-out text",
        "best": "keep the checkpoint with the lowest held-out loss",
        "metrics.log-freq": "steps between two progress lines",
        "checkpoint.interval": "steps between two checkpoints",
        "checkpoint.keep-latest-k": "newest checkpoints to keep; 0 keeps all",
    },
    "many devices": {
        "parallelism.tensor-parallel-degree": "ranks that share each layer",
        "parallelism.context-parallel-degree": "ranks that share each window",
        "parallelism.expert-parallel-degree": "ranks that share each layer's experts",
        "compile.enable": "compile the layers",
    },
}
"""Flags of `--help` and their texts, by topic."""

WITHOUT_EFFECT = {
    "--parallelism.pipeline-parallel": "a loop over layers cannot be cut into a pipeline",
    "--parallelism.module-fqns-per-model-part": "a loop over layers cannot be cut into a pipeline",
    "--debug.moe-": "experts are balanced by --model.bias-rate and --loss.balance-weight",
    "--checkpoint.initial-load": "start from a model with --from or --checkpoint.carry.parent",
    "--checkpoint.last-save": "titan-loop convert export writes Hugging Face folders",
    "--checkpoint.export-dtype": "titan-loop convert export has a --dtype of its own",
    "--training.global-batch-size": "set --batch.global-batch-tokens",
}
"""Prefix of torchtitan flags that have no effect here → reason."""


def flags_of(config: Any) -> dict[str, Any]:
    """Return flag → value for a config and its nested fields, less the flags without an effect."""
    without = tuple(WITHOUT_EFFECT)
    return {
        name: value
        for name, settable, value in _fields(config, "--")
        if settable and not name.startswith(without)
    }


def fixed_flags(config: Any) -> list[str]:
    """Return the flags that torchtitan's rule offers for fields that `__init__` does not take."""
    return [name for name, settable, _ in _fields(config, "--") if not settable]


def _fields(config: Any, prefix: str) -> Iterator[tuple[str, bool, Any]]:
    """Yield flag, whether it may be set, and value."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        name = prefix + field.name.replace("_", "-")
        marks = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Suppress in marks:
            continue
        value = getattr(config, field.name)
        if field.init and is_dataclass(value) and not isinstance(value, (type, Schedule)):
            nameless = any(getattr(mark, "name", None) == "" for mark in marks)  # no prefix
            yield from _fields(value, prefix if nameless else f"{name}.")
        else:
            yield name, field.init, value


def help_text(flags: Mapping[str, Any], program: str, choices: Sequence[str]) -> str:
    """Return the page of the important flags, and of the choices that follow them."""
    lines = [f"usage: {program} [FLAGS] [CHOICE]", ""]
    for title, texts in FIRST.items():
        lines.append(f"{title}:")
        for name, text in texts.items():
            if (flag := f"--{name}") in flags:
                lines += [f"  {flag} ({_shown(flags[flag])})", f"      {text}"]
        lines.append("")
    if choices:
        lines += [f"choices, each with a --help of its own: {', '.join(choices)}", ""]
    lines.append("Separate items by spaces or commas; write token counts with K, M, B or T.")
    lines.append(f"{program} --help-all lists all {len(flags)} flags.")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return "none" if value is None else text or "none"
