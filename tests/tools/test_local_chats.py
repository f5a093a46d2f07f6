"""Chats from docstrings: what becomes one, and what is held out."""

import json
from pathlib import Path

import pytest

from titan_loop.data.demo import local_python
from titan_loop.data.demo.local_python import document_identity
from titan_loop.data.demo.local_python import split_of as split_of_document
from tools.local_chats import build_local_chats, function_chats

MODULE = '''
def total(numbers, start):
    """Add all the numbers up
    and return their sum.

    More about it."""
class A:
    """A class is nothing that does something."""
    async def wait(self):
        """Wait until something has happened."""
    def _hidden(self):
        """Hide from everybody who might be looking."""
def short():
    """Too short."""
def silent():
    pass
'''


def test_a_chat_asks_for_the_first_paragraph_of_a_public_function():
    assert [tuple(chat) for chat in function_chats(MODULE, "sums")] == [
        (
            "What does `total(numbers, start)` of sums do?",
            "Add all the numbers up and return their sum.",
        ),
        ("What does `A.wait(self)` of sums do?", "Wait until something has happened."),
    ]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    build_local_chats(folder, megabytes=0.02, held_out_fraction=0.3)
    return folder


def records(folder: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_bytes().splitlines()]


def test_what_the_corpus_holds_out_is_held_out_here(chats: Path):
    """A question names its file, and the file's document is in the same split of the corpus."""
    split_of: dict[str, str] = {}
    for file in local_python.python_files(local_python.installed_distributions()):
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        split = split_of_document(document_identity(file), 0.3)
        split_of[f"{file.package}/{module}"] = split
    counts = {"train": 0, "held_out": 0}
    for split in counts:
        for record in records(chats, split):
            if record["source"] != "mano":
                module = record["question"].rpartition(" of ")[2].removesuffix(" do?")
                assert split_of[f"{record['source']}/{module}"] == split
                counts[split] += 1
    assert min(counts.values()) > 5
