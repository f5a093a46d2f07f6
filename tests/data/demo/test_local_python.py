"""The corpus of the quick start: documents once, splits by hash, the same again."""

import json
import logging
from pathlib import Path

import pytest

from titan_loop.data.demo import local_python
from titan_loop.data.demo.local_python import DOMAINS, build_local_python_corpus, docstrings
from titan_loop.data.demo.sources import demo_sources
from titan_loop.errors import UserError

SIZES = dict.fromkeys(DOMAINS, 0.3)
SMALL = {f"{domain}_megabytes": size for domain, size in SIZES.items()}


@pytest.fixture(scope="module", autouse=True)
def _one_list_of_files():
    """List the files of a few packages alone; listing those of torch takes seconds."""
    every = local_python.installed_distributions()
    distributions = {name: every[name] for name in ("mpmath", "numpy", "sympy", "torchtitan")}
    files = local_python.python_files(distributions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_python, "installed_distributions", lambda: distributions)
        patch.setattr(local_python, "python_files", lambda _: files)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    build_local_python_corpus(folder, SIZES, held_out_fraction=0.2)
    return folder


def test_documents_are_taken_once_and_sympy_only_in_math(corpus):
    card = json.loads((corpus / "card.json").read_text())
    every = []
    for domain in DOMAINS:
        both = []
        for split in ("train", "held_out"):
            lines = (corpus / domain / f"{split}.jsonl").read_bytes().splitlines()
            assert card["documents"][domain][split] == len(lines) > 0
            both += map(json.loads, lines)
        assert 300_000 <= sum(len(record["text"].encode()) for record in both) < 500_000
        sources = {record["source"] for record in both}
        assert (sources <= {"sympy", "mano"}) == (domain == "math")
        assert domain == "math" or not {"sympy", "titan-loop", "execnet"} & sources
        every += both
    assert len({record["text"] for record in every}) == len(every)
    files = {record["id"].removesuffix("#docstrings") for record in every}
    assert len(files) == len(every)  # a file is taken whole or for its docstrings, never both


def test_the_same_environment_gives_the_same_sources_once(corpus, tmp_path, caplog):
    build_local_python_corpus(tmp_path / "text", SIZES, held_out_fraction=0.2)
    for domain in DOMAINS:
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


def test_a_domain_needs_a_size(tmp_path):
    with pytest.raises(UserError, match="code_megabytes 0 must be positive"):
        build_local_python_corpus(tmp_path, SIZES | {"code": 0})
