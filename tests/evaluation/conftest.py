"""Fixtures of evaluation: runs whose one checkpoint was written without training."""

from pathlib import Path

import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from tests.inference.conftest import (  # noqa: F401
    ended_run,
    own_run,
    run_of_the_readme,
    trained_run,
)
from titan_loop.data.prepare.tokenize_source import tokenize_source


@pytest.fixture(autouse=True)
def quiet_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress bars, which start threads of their own."""
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="session")
def little_held_out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with the same tokenizer and a few held-out tokens, fewer than a window."""
    folder = tmp_path_factory.mktemp("little")
    for name, text in (
        ("train", "def f(x):\n    return x\n" * 40),
        ("held_out", "x = 1; y = 2"),
    ):
        (folder / f"{name}.txt").write_text(text)
    tokenize_source(
        folder / "train.txt",
        output=folder / "little",
        tokenizer=source / "tokenizer.json",
        held_out_inputs=[folder / "held_out.txt"],
    )
    return folder / "little"


@pytest.fixture(scope="session")
def text_run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose source has held-out text; its checkpoint was never trained."""
    run = write_run_of(source, tmp_path_factory.mktemp("text") / "run")
    write_checkpoint_of(run, 3)
    return run
