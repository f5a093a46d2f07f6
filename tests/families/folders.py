"""One small model for every format that is a folder, for tests that hold for each."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.families.ouro.hugging_face.conftest import convert, randomise, write_run
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, get_family
from titan_loop.plugins import names

VOCABULARY = 300
WINDOW = 128
_LOOP = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1, "recurrent_steps": 2}
_EXPERTS = {"experts": 4, "expert_hidden_dim": 32}


class Case(NamedTuple):
    """A family, options of a model, and whether transformers 4 has the format, too."""

    family: str
    options: dict[str, Any]
    old: bool = True


_ALL = {
    "ernie4_5_moe-unrolled": Case("moe", {**_EXPERTS, "router": "softmax"}),
    "glm4_moe-unrolled": Case("moe", _EXPERTS),
    "hrm_text": Case("hrm_text", {}, old=False),
    "llama-unrolled": Case("nanbeige", {"recurrent_steps": 2}),
    "mixtral-unrolled": Case("moe", {**_EXPERTS, "router": "softmax"}),
    "nanbeige": Case("nanbeige", {"recurrent_steps": 2, "norm_placement": "every_step"}),
    "retrofit": Case("retrofit", {**_LOOP, "bridge": True}),
    "retrofit-unrolled": Case("retrofit", _LOOP),
    "transformers": Case("ouro", {"recurrent_steps": 2}),
}
CASES = {name: case for name, case in _ALL.items() if case.family in names("families")}
OWN_CODE = [name for name in ("nanbeige", "retrofit", "transformers") if name in CASES]
"""Formats whose folders hold code for transformers."""


class Written(NamedTuple):
    """A model, its run and its exported folder."""

    model: LoopDecoder
    run: Path
    folder: Path


def write_folder(
    place: Path, name: str, tokenizer: Path | None, *flags: object, **options: Any
) -> Written:
    """Write a run of the format's case, with options changed, and export it."""
    case = CASES[name]
    chosen = get_family(case.family).options(vocab_size=VOCABULARY, **{**case.options, **options})
    torch.manual_seed(20)
    model = build_decoder(chosen, max_seq_len=WINDOW).eval()
    randomise(model)
    write_run(place / "run", chosen, model)  # type: ignore[arg-type]
    with_tokenizer = ("--no-tokenizer",) if tokenizer is None else ("--tokenizer", tokenizer)
    convert(
        "export", place / "run", "--to", name, "--output", place / name, *with_tokenizer, *flags
    )
    return Written(model, place / "run", place / name)
