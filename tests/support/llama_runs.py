"""Runs of Llama blocks with random weights, and a tokenizer whose every token is whole text."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.families.ouro.hugging_face.conftest import corpus, random_model, write_run
from titan_loop.formats.stress_texts import stress_texts
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.dense import DenseOptions
from titan_loop.models.loop_options import LoopOptions
from titan_loop.text.tokenizer import SPECIAL_TOKENS

VOCABULARY = 300
CLOSE = 1e-5
# 48, as torch 2.13's FlexAttention on a CPU without AVX-512 is wrong at lengths of 8 modulo 32.
TOKENS = torch.arange(48)[None] * 7 % VOCABULARY


def ours(model, tokens=TOKENS, **settings):
    with torch.no_grad():
        return model.readout(model(tokens, **settings).hidden_RBLD[-1])


class Made(NamedTuple):
    """A model and its run."""

    model: LoopDecoder
    run: Path


Make = Callable[..., Made]


def maker(kind: type[LoopOptions], folders: pytest.TempPathFactory) -> Make:
    """Return `make(**options)`, which writes the run of a model whose every weight matters."""

    def make(**options: object) -> Made:
        chosen = kind(**{"vocab_size": VOCABULARY, **options})  # type: ignore[arg-type]
        model = random_model(chosen)
        run = folders.mktemp(chosen.family) / "run"
        write_run(run, chosen, model)  # type: ignore[arg-type]
        return Made(model, run)

    return make


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return the maker of Llama blocks."""
    return maker(DenseOptions, tmp_path_factory)


def train_tokenizer(path: Path, *, digits: bool, every_byte: bool) -> Path:
    """Write a byte-level BPE of `VOCABULARY` tokens.

    Args:
        path: The file.
        digits: Whether digits are split one by one.
        every_byte: Whether every byte has a token. Without it all tokens are ASCII, so that an
            engine that holds back unfinished characters shows each of them.
    """
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    tokenizer.pre_tokenizer = (  # type: ignore[assignment]
        pre_tokenizers.Sequence(splits) if digits else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + (100 if every_byte else 0),
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if every_byte else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.save(str(path))
    return path


UNSPLIT = 2000


def train_unsplit_tokenizer(path: Path) -> Path:
    """Write a byte-level BPE of at most `UNSPLIT` tokens whose merges reach across all words.

    Its ids show where a pre-tokenizer cuts.
    """
    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = bytes_  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=UNSPLIT,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*stress_texts()], trainer)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def ascii_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json of `VOCABULARY` tokens of ASCII."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(path, digits=True, every_byte=False)


@pytest.fixture(scope="session")
def unsplit_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json whose ids show where a pre-tokenizer cuts."""
    return train_unsplit_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
