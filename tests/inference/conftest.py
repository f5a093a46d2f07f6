"""A run directory with one checkpoint, written without training."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.inference.reference import CONTEXT, make_model
from titan_loop.checkpoint.tensors import write_checkpoint
from titan_loop.data.source_card import SourceCard
from titan_loop.inference.engine import Engine
from titan_loop.inference.loading import load_checkpoint
from titan_loop.inference.rows import Request
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.text.tokenizer import SPECIAL_TOKENS

VOCABULARY = 300


def byte_level_tokenizer() -> Tokenizer:
    """The control tokens first, then one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS])
    return tokenizer


def write_run(folder: Path) -> Path:
    """Write source and run below `folder`; return the run's folder."""
    source = folder / "source"
    source.mkdir()
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    digest = hashlib.sha256((source / "tokenizer.json").read_bytes()).hexdigest()
    SourceCard(
        name="source",
        tokenizer_sha256=digest,
        vocab_size=VOCABULARY,
        eos_id=0,
        token_bytes=2,
        splits={},
        licence="",
        versions={},
        command="",
    ).write(source)
    model = make_model(vocab_size=VOCABULARY)
    run = RunDirectory(folder / "run")
    write_checkpoint(
        run.checkpoint(5),
        model.state_dict(),
        {
            "step": 5,
            "trainer": {
                "step": 5,
                "tokens": 0,
                "recurrent_steps": 2,
                "architecture": model.config.architecture,
            },
            "data": {},
            "lineage": {},
        },
    )
    run.create_or_open(
        ["test"],
        config={
            "model": {"family": "ouro", "size": "debugmodel", "vocab_size": VOCABULARY},
            "training": {"seq_len": CONTEXT},
            "dataloader": {"mixture": [f"{source}=1"]},
            "checkpoint": {"folder": "checkpoints"},
        },
    )
    return run.path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tests only read."""
    return write_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def own_run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage; its source is still the shared one."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture
def run_of_the_readme(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of `trained_run` as `runs/my` in the current folder."""
    (own_run.parent / "runs").mkdir()
    own_run.rename(own_run.parent / "runs" / "my")
    monkeypatch.chdir(own_run.parent)


class EndedRun(NamedTuple):
    """A run whose texts end elsewhere, and the token at which its greedy completion must stop."""

    path: Path
    prompt: str
    end: int
    tokens: list[int]


@pytest.fixture
def ended_run(own_run: Path, tmp_path: Path) -> EndedRun:
    """A copy of `trained_run` prepared with another `--eos-token`: one it generates on its own."""
    loaded = load_checkpoint(own_run)
    prompt = byte_level_tokenizer().encode("def f(").ids
    engine = Engine(loaded.model, recurrent_steps=loaded.recurrent_steps)
    (free,) = engine.complete([Request(prompt=prompt, max_new_tokens=12)])
    stop = next(i for i in range(2, 12) if free.tokens[i] not in free.tokens[:i])
    source = tmp_path / "ended"
    shutil.copytree(loaded.run.sources[0], source)
    replace(SourceCard.read(source), eos_id=free.tokens[stop]).write(source)
    config = RunDirectory(own_run).read_config()
    config["dataloader"]["mixture"] = [f"{source}=1"]
    (own_run / "config.json").write_text(json.dumps(config))
    return EndedRun(own_run, "def f(", free.tokens[stop], free.tokens[:stop])


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """What `trained_run` was written from."""
    return make_model(vocab_size=VOCABULARY).state_dict()
