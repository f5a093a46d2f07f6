"""One shape of data that people have: how it is written, and what becomes of it.

A row either lists the documents that a source must hold, or the refusal. `test_shapes.py` checks
every row; `python -m tests.data.shapes` writes them all into `titan_loop/data/SHAPES.md`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A row of the table.

    Attributes:
        section: Heading below which the row stands in the table.
        found: Files and records, in words.
        taken: Their documents, or the refusal, in words.
        make: Writes the files into the empty folder that it is given.
        inputs: Inputs of `tokenize_source`, relative to that folder, in which it runs.
        options: Further arguments of `tokenize_source`; paths are relative, too.
        train: Texts of the documents to train on, in any order; chats in their template.
        held_out: Texts of the held-out documents.
        targets: What each training document teaches, as text, in the order of `train`; None if
            documents have no loss mask and every token is a target.
        warned: A part of every warning; a warning without one fails the row.
        dropped: Dropped records by reason, as the card counts them.
        repaired: Repaired records by kind, as the card counts them.
        tokenizer: Writes a tokenizer.json into a folder and returns it; None for the tests' own
            byte-level one.
        stored: Texts that the stored ids give back, where a tokenizer changes them; else `train`.
        refused: Pattern of the one line that refuses the data; then nothing is stored.
    """

    section: str
    found: str
    taken: str
    make: Callable[[Path], object]
    inputs: tuple[str, ...] = (".",)
    options: Mapping[str, Any] = field(default_factory=dict)
    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    warned: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    repaired: Mapping[str, int] = field(default_factory=dict)
    tokenizer: Callable[[Path], Path] | None = None
    stored: tuple[str, ...] | None = None
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.section}: {self.found}"
