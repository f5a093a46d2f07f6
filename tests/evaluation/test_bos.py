"""A BOS of the tokenizer's template: in the data, in prompts, in scores and in exports."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from tests.evaluation.test_harness_model import ask, nats
from titan_loop.cli.main import main
from titan_loop.data.load.held_out_windows import held_out_windows
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.data.source_card import SourceCard
from titan_loop.evaluation.harness_model import LoopLM
from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.inference.rows import text_requests
from titan_loop.runs.saved_run import SavedRun
from titan_loop.text.tokenizer import END_OF_TEXT, encode_prompt, template_prefix

BOS = "<|im_start|>"  # any special token of the tests' tokenizer may serve


def of_template(tokenizer: Path, folder: Path) -> Path:
    made = Tokenizer.from_file(str(tokenizer))
    token = (BOS, made.token_to_id(BOS))
    end = (END_OF_TEXT, made.token_to_id(END_OF_TEXT))  # which no prompt may end in
    template = processors.TemplateProcessing(
        single=f"{BOS} $A {END_OF_TEXT}", special_tokens=[token, end]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(), template])  # type: ignore[assignment]
    made.save(str(folder / "bos.json"))
    return folder / "bos.json"


@pytest.fixture(scope="module")
def sources(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same documents with BOS and without."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = of_template(source / "tokenizer.json", folder)
    documents = folder / "documents"
    documents.mkdir()
    for number in range(40):
        (documents / f"{number}.txt").write_text(
            f"def f{number}(x):\n    return x + {number}\n" * 9
        )
    for name, no_bos in (("with", False), ("without", True)):
        tokenize_source(
            documents,
            output=folder / name,
            tokenizer=tokenizer,
            held_out_fraction=0.5,
            no_bos=no_bos,
        )
    return {name: folder / name for name in ("with", "without")}


def test_every_held_out_window_begins_with_it(sources: dict[str, Path]) -> None:
    windows = held_out_windows(sources["with"], seq_len=24, count=12)
    bos = SourceCard.read(sources["with"]).bos_id
    assert (windows.input[:, 0] == bos).all()
    inside = windows.input[:, 1:] != bos
    assert (windows.labels[:, :-1][inside] == windows.input[:, 1:][inside]).all()


@pytest.fixture(scope="module")
def runs(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {}
    for name, source in sources.items():
        runs[name] = write_run_of(source, tmp_path_factory.mktemp(name) / "run")
        write_checkpoint_of(runs[name], 3)
    return runs


def test_every_document_begins_with_it_and_nothing_predicts_it(sources: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(sources["with"] / "tokenizer.json"))
    bos = tokenizer.token_to_id(BOS)
    assert template_prefix(tokenizer) == [bos]
    assert SourceCard.read(sources["with"]).bos_id == bos
    assert SourceCard.read(sources["without"]).bos_id is None
    with_bos, without = (TokenShards(sources[name]) for name in ("with", "without"))
    for number in range(with_bos.split.documents):
        ids = with_bos.document(number).tolist()
        assert ids == [bos, *without.document(number).tolist()]
    config = WindowLoader.Config(mixture=[f"{sources['with']}=1"], prefetch=False)
    loader = config.build(dp_world_size=1, dp_rank=0, seq_len=96, local_batch_size=4)
    for batch, labels in loader.read_step(4):
        assert (batch["input"] == bos).any()
        assert not (labels == bos).any()


def test_a_source_whose_documents_begin_or_end_otherwise_is_told(
    sources: dict[str, Path], runs: dict[str, Path], tmp_path: Path, caplog
) -> None:
    card = SourceCard.read(sources["with"])
    other = Tokenizer.from_file(str(sources["with"] / "tokenizer.json")).token_to_id(BOS)
    shutil.copytree(sources["with"], tmp_path / "other")
    replace(card, eos_id=other).write(tmp_path / "other")
    for source, told in (
        (sources["with"], []),
        (sources["without"], ["documents with BOS"]),
        (tmp_path / "other", [f"{END_OF_TEXT}, {tmp_path / 'other'} ends them in {BOS}"]),
    ):
        caplog.clear()
        SavedRun(runs["with"]).check_source(source)
        assert len(caplog.messages) == len(told)
        assert all(words in line for words, line in zip(told, caplog.messages, strict=True))


def test_prompts_and_scores_begin_with_it(runs: dict[str, Path]) -> None:
    run = runs["with"]
    loaded = load_checkpoint(run)
    tokenizer = load_matching_tokenizer(loaded)
    bos: Any = text_ends(loaded, tokenizer).begin_of_text
    assert bos == tokenizer.token_to_id(BOS)
    lm: Any = LoopLM(run, recurrent_steps=2)
    prompt = tokenizer.encode("def f(", add_special_tokens=False).ids
    answer = tokenizer.encode("x):", add_special_tokens=False).ids
    scores = lm.loglikelihood(ask(("def f(", "x):"), ("", "x):"), (f"{BOS}def f(", "x):")))
    whole = -nats(run, [bos, *prompt, *answer], 1 + len(prompt), steps=2)
    alone = -nats(run, [bos, *answer], 1, steps=2)
    assert [score for score, _ in scores] == pytest.approx([whole, alone, whole], abs=1e-4)
    # Not log p(BOS | BOS) first, as the harness' own model has it.
    assert lm.loglikelihood_rolling(ask(("x):",))) == pytest.approx([alone], abs=1e-4)
    (request,) = text_requests(tokenizer, ["def f("], stop_tokens=frozenset(), begin=bos)
    assert request.prompt == encode_prompt(tokenizer, "def f(", bos) == [bos, *prompt]


def test_exports_add_it_only_for_a_model_that_has_seen_it(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    for name, run in runs.items():
        folder = tmp_path / name
        assert main(["convert", "export", str(run), "--output", str(folder)]) == 0
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        bos = tokenizer.token_to_id(BOS) if name == "with" else 0
        assert tokenizer.encode("a").ids == encode_prompt(tokenizer, "a", bos or None)
        assert json.loads((folder / "config.json").read_text())["bos_token_id"] == bos
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert tokenizer.token_to_id(settings["bos_token"]) == bos
        again = tmp_path / f"again-{name}"
        assert main(["convert", "import", str(folder), "--output", str(again)]) == 0
        assert LoopLM(again).tok_encode("def") == LoopLM(run).tok_encode("def")
