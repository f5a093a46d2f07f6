"""Small models with every weight at random, their runs and exported folders, and transformers."""

import importlib
import os
import shutil
import signal
import string
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from tests.support.multiprocess import preloaded_context
from titan_loop.checkpoint.tensors import write_checkpoint
from titan_loop.cli import main as cli
from titan_loop.data.source_card import SourceCard, file_sha256
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.models.loop_options import LoopOptions
from titan_loop.runs.run_directory import RunDirectory

VOCABULARY = 300
WINDOW = 128
STEP, TOKENS = 7, 7 * 4096
LINEAGE = {"parent": None, "recipe_sha256": "c0ffee", "stage": "1a"}


def corpus() -> list[str]:
    """Return text that no change of the code changes: what tests read must not depend on it."""
    return [(Path(__file__).parents[4] / "LICENSE").read_text(), string.printable]


def randomise(model: LoopDecoder) -> None:
    """Make every weight matter: matrices at random, norms away from 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, std=0.1)
            if "norm" in name:
                parameter.add_(1.0)


def random_model(options: LoopOptions) -> LoopDecoder:
    """Build a model whose every weight matters, with gate logits of both signs."""
    torch.manual_seed(20)
    model = build_decoder(options, max_seq_len=WINDOW).eval()
    randomise(model)
    if model.exit_gate is not None:
        nn.init.normal_(model.exit_gate.weight, std=0.2)
    if options.tie_weights:
        model.lm_head.weight = model.tok_embeddings.weight
    return model


def write_source(source: Path, tokenizer_file: Path, *, eos_id: int, chat: bool = False) -> None:
    """Write what a conversion looks at in a prepared source: its card and its tokenizer."""
    source.mkdir(parents=True)
    shutil.copyfile(tokenizer_file, source / "tokenizer.json")
    SourceCard(
        name=source.name,
        tokenizer_sha256=file_sha256(tokenizer_file),
        vocab_size=VOCABULARY,
        eos_id=eos_id,
        token_bytes=2,
        splits={},
        licence="test",
        versions={},
        command="test",
        has_loss_mask=chat,
    ).write(source)


def write_run(
    run: Path, options: OuroOptions, model: LoopDecoder, mixture: Sequence[str] = ()
) -> Path:
    """Write the run directory of a finished training; return its checkpoint."""
    config = {
        "model": asdict(options),
        "training": {"seq_len": WINDOW},
        "dataloader": {"mixture": [*mixture]},
        "checkpoint": {"folder": "checkpoints"},
    }
    directory = RunDirectory(run)
    directory.create_or_open(["test"], config=config)
    trainer = {
        "step": STEP,
        "tokens": TOKENS,
        "recurrent_steps": model.recurrent_steps,
        "architecture": model.config.architecture,
    }
    write_checkpoint(
        directory.checkpoint(STEP),
        dict(model.state_dict()),
        {
            "step": STEP,
            "created": "2026-01-01T00:00:00+00:00",
            "stage_end": True,
            "trainer": trainer,
            "data": {},
            "lineage": LINEAGE,
        },
    )
    return directory.checkpoint(STEP)


class Exported(NamedTuple):
    """A model, its run, and the folder it was exported to."""

    model: LoopDecoder
    run: Path
    folder: Path


def convert(*arguments: object) -> None:
    """Run `titan-loop convert`, which must succeed."""
    assert cli.main(["convert", *map(str, arguments)]) == 0


def convert_until(function: str, module: str, arguments: Sequence[str]) -> None:
    """Run `titan-loop convert` until the module calls the function, which kills this process."""
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    setattr(importlib.import_module(module), function, lambda *_, **__: kill())
    cli.main(["convert", *arguments])


def convert_killed(at: Callable[..., object], module: ModuleType, *arguments: object) -> None:
    """Run `titan-loop convert` in a process that is killed where `module` calls the function."""
    words = [*map(str, arguments)]
    child = preloaded_context().Process(
        target=convert_until, args=(at.__name__, module.__name__, words)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json of `VOCABULARY` tokens that splits digits.

    Made as `titan-loop data train-tokenizer` does, but without datatrove, whose huggingface_hub is
    not that of transformers 4.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


Exporter = Callable[..., Exported]


@pytest.fixture(scope="session")
def export_model(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Exporter:
    """Return `export(options, *flags)`, which makes a run and exports it."""

    def export(options: OuroOptions, *flags: object) -> Exported:
        folder = tmp_path_factory.mktemp("model")
        model = random_model(options)
        write_run(folder / "run", options, model)
        output = folder / "exported"
        convert(
            *("export", folder / "run", "--output", output, "--tokenizer", tokenizer_file), *flags
        )
        return Exported(model, folder / "run", output)

    return export


@pytest.fixture(scope="session")
def plain(export_model: Exporter) -> Exported:
    """Return a model like the released ones: as many key-value as query heads, untied."""
    return export_model(OuroOptions(vocab_size=VOCABULARY))


@pytest.fixture(scope="session")
def grouped(export_model: Exporter) -> Exported:
    """Return a ChatML model with grouped heads and tied embeddings, in several shards."""
    options = OuroOptions(
        vocab_size=VOCABULARY, n_kv_heads=2, tie_weights=True, rope_theta=500.0, recurrent_steps=4
    )
    return export_model(options, "--chatml", "--max-shard-gigabytes", "1e-4")
