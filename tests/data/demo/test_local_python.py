import json
import logging
from pathlib import Path

import pytest

from titan_loop.data.demo.local_python import DOMAINS, build_local_python_corpus, docstrings
from titan_loop.data.demo.overlap import overlaps
from titan_loop.data.demo.sources import demo_sources
from titan_loop.errors import UserError

SMALL = {"code_megabytes": 0.3, "prose_megabytes": 0.3, "math_megabytes": 0.3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    build_local_python_corpus(folder, **SMALL, held_out_fraction=0.2)
    return folder


def records(corpus: Path, domain: str, split: str) -> list[dict[str, str]]:
    lines = (corpus / domain / f"{split}.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def test_documents_are_taken_once_and_sympy_only_in_math(corpus):
    splits = {(d, s): records(corpus, d, s) for d in DOMAINS for s in ("train", "held_out")}
    for domain in DOMAINS:
        both = splits[domain, "train"] + splits[domain, "held_out"]
        assert 300_000 <= sum(len(record["text"].encode()) for record in both) < 500_000
        assert splits[domain, "held_out"]
        sources = {record["source"] for record in both}
        assert (sources <= {"sympy", "mano"}) == (domain == "math")
        assert domain == "math" or not {"sympy", "titan-loop", "execnet"} & sources
    every = [record for found in splits.values() for record in found]
    assert len({record["text"] for record in every}) == len(every)
    files = {record["id"].removesuffix("#docstrings") for record in every}
    assert len(files) == len(every)  # a file is taken whole or for its docstrings, never both


def test_the_card_describes_the_corpus(corpus):
    card = json.loads((corpus / "card.json").read_text())
    used = set()
    trained = [r["text"] for domain in DOMAINS for r in records(corpus, domain, "train")]
    for domain in DOMAINS:
        for split in ("train", "held_out"):
            found = records(corpus, domain, split)
            assert card["domains"][domain][split]["documents"] == len(found)
            used |= {record["source"] for record in found}
        overlap = card["domains"][domain]["held_out_in_training"]
        held_out = [record["text"] for record in records(corpus, domain, "held_out")]
        assert overlap == overlaps(trained, {domain: held_out})[domain]
    assert set(card["licences"]) == used
    assert card["licences"]["mano"]
    assert card["licences"]["sympy"]["licence"].startswith("BSD")
    assert card["command"]


def test_a_small_demo_needs_no_other_flag(corpus, tmp_path, caplog):
    build_local_python_corpus(tmp_path / "text", **SMALL, held_out_fraction=0.2)
    for domain in DOMAINS:  # the same environment gives the same corpus
        for name in ("train.jsonl", "held_out.jsonl"):
            again = (tmp_path / "text" / domain / name).read_bytes()
            assert again == (corpus / domain / name).read_bytes()
    for _ in range(2):  # the second time nothing is left to do, and says so
        with caplog.at_level(logging.INFO):
            sources = list(demo_sources(tmp_path, **SMALL, vocab_size=300))
        assert sources == [str(tmp_path / domain) for domain in DOMAINS]
    assert "text is complete: to build it with other sizes, remove" in caplog.text


def test_docstrings_carry_their_names():
    source = '"""Module."""\nclass A:\n    """Class."""\n    def b(self):\n        """Method."""\n'
    assert docstrings(source) == "Module.\n\n\nA\n\nClass.\n\n\nA.b\n\nMethod."
    assert docstrings("x = 1") == ""


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="code_megabytes 0 must be positive"):
        build_local_python_corpus(tmp_path, code_megabytes=0)
    with pytest.raises(UserError, match=r"MB of text and at_least_megabytes is 20"):
        build_local_python_corpus(tmp_path, **SMALL, at_least_megabytes=20)
    assert not (tmp_path / "card.json").exists()
