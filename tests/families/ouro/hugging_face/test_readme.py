"""The README's examples, run as they stand there."""

import json
from pathlib import Path

import pytest

import titan_loop.families.ouro.hugging_face
from tests.families.ouro.hugging_face.conftest import (
    VOCABULARY,
    random_model,
    write_run,
    write_source,
)
from tests.readme import readme_of, run_commands, run_example
from titan_loop.families.ouro.model import OuroOptions

README = readme_of(titan_loop.families.ouro.hugging_face)


@pytest.fixture
def in_a_folder_with_a_run(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_source(Path("sources/my"), tokenizer_file, eos_id=0)
    options = OuroOptions(vocab_size=VOCABULARY)
    write_run(Path("runs/mine"), options, random_model(options), mixture=["sources/my=1"])


@pytest.mark.usefixtures("in_a_folder_with_a_run")
def test_the_commands_run():
    run_commands(README)
    assert json.loads(Path("ouro-mine/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert Path("runs/back/checkpoints/step-0/manifest.json").is_file()


@pytest.mark.usefixtures("in_a_folder_with_a_run", "transformers")
def test_the_python_example_runs():
    run_commands(README)
    names = run_example(README)
    prompts = names["prompts"]["input_ids"]
    for answer in (names["full"], names["shallow"], names["early"]):
        assert answer.shape[0] == 2
        assert prompts.shape[1] < answer.shape[1] <= prompts.shape[1] + 8
    assert names["steps"].shape == prompts.shape
