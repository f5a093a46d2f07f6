"""The texts that a tokenizer is trained on: read, counted, and without endless words.

Training takes time in proportion to the square of its longest word, which may be megabytes of
letters without a space, such as a genome, or of Chinese without punctuation.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from titan_loop.data.prepare.documents import Documents
from titan_loop.data.prepare.readers import (
    DROPPED_BY_READERS,
    document_reader,
    report_dropped,
)

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

logger = logging.getLogger(__name__)

LONGEST_WORD = 4096
"""Characters of the longest word that is learnt from whole."""
_LEARNT = 1 << 16  # characters of a long word that are learnt from, in pieces
_CUT_LENGTH = 64  # longer than any useful token
_RUNS = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}|(?<!\s)\s{{{LONGEST_WORD},}}")
_PROGRESS_SECONDS = 20.0


def training_texts(
    documents: Documents, words: "PreTokenizer", *, text_key: str, max_malformed: float
) -> Iterator[str]:
    """Yield the texts of documents, with every word of more than `LONGEST_WORD` characters cut.

    `words` splits texts into words. Of such a word, characters beyond the first 65,536 are left
    out: even in pieces they cost as much as ten times their number of ordinary text. Logs the
    progress; raises `UserError` at the end if more than a share of `max_malformed` of the records
    are malformed or lack their text.
    """
    characters = long_words = left_out = number = 0
    began = said = time.monotonic()
    with TemporaryDirectory() as folder:
        paths = Path(folder) / "inputs.txt"
        reader = document_reader(documents.files, paths_file=paths, text_key=text_key, chat=None)
        for number, document in enumerate(reader.run(), start=1):
            cut = without_long_words(document.text, words)
            yield from cut.parts
            characters += len(document.text)
            long_words += cut.long_words
            left_out += cut.left_out
            if time.monotonic() - said >= _PROGRESS_SECONDS:
                said = time.monotonic()
                logger.info("%d documents, %.1f M characters read", number, characters / 1e6)
    counts = Counter({name: int(value.total) for name, value in reader.stats.stats.items()})
    reasons = {kind: counts[kind] for kind in DROPPED_BY_READERS if counts[kind]}
    report_dropped("tokenizer inputs", counts, max_malformed, reasons)
    if long_words:
        logger.warning(
            f"tokenizer inputs: {long_words} words of more than {LONGEST_WORD} characters were "
            f"cut into pieces, and {left_out} of their characters left out"
        )
    logger.info(
        f"{number} documents, {characters / 1e6:.1f} M characters read in "
        f"{time.monotonic() - began:.0f} s; merging"
    )


class Cut(NamedTuple):
    """A text without long words: its parts, and the number and the lost characters of these."""

    parts: Sequence[str]
    long_words: int = 0
    left_out: int = 0


def without_long_words(text: str, words: "PreTokenizer") -> Cut:
    """Cut a text inside its long words, of which `_LEARNT` characters are kept."""
    long_words = [
        (run.start() + first, run.start() + last)
        for run in _RUNS.finditer(text)
        for _, (first, last) in words.pre_tokenize_str(run[0])
        if last - first > LONGEST_WORD
    ]
    parts: list[str] = []
    left_out = done = 0
    for first, last in long_words:
        kept = min(last, first + _LEARNT)
        places = [done, *range(first + _CUT_LENGTH, kept, _CUT_LENGTH), kept]
        parts += [text[a:b] for a, b in pairwise(places)]
        left_out += last - kept
        done = last
    return Cut([*parts, text[done:]], len(long_words), left_out)
