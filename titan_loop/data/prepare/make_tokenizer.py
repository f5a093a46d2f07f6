"""Make a `tokenizer.json`: train a byte-level BPE.

Training takes time in proportion to the square of its longest word, which may be megabytes of
letters without a space, such as a genome, or of Chinese without punctuation. Such words are cut.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from titan_loop.data.prepare.documents import Documents, Format, Inputs, find_documents
from titan_loop.errors import UserError
from titan_loop.storage.file_names import require_local
from titan_loop.text.tokenizer import BYTE_VALUES, SPECIAL_TOKENS, TOKENIZER_NAME

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

logger = logging.getLogger(__name__)

LONGEST_WORD = 4096
"""Characters of the longest word that is learnt from whole."""
LEARNT = 1 << 16
"""Characters of a longer word that are learnt from, in pieces; even so they cost as much as ten
times their number of ordinary text."""
_CUT_LENGTH = 64  # longer than any useful token
_RUNS = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}|(?<!\s)\s{{{LONGEST_WORD},}}")
_PROGRESS_SECONDS = 20.0


def train_tokenizer(
    inputs: Inputs,
    *,
    vocab_size: int,
    output: str | Path,
    format: Format = "auto",
    pattern: tuple[str, ...] = (),
    text_key: str = "text",
    max_malformed: float = 0.01,
) -> Path:
    """Train a byte-level BPE on documents and write its tokenizer.json.

    Digits are split individually; merges never cross the words of GPT-2's pattern. Words of more
    than 4,096 characters are cut for the training. The result is the same for the same documents.

    Args:
        inputs: Files as `data tokenize` reads them, or folders of these. A folder's held-out files
            are not read.
        vocab_size: Number of tokens, special ones and the 256 bytes included.
        output: Path of the new tokenizer.json, or an existing folder for it.
        format: Format of the files; auto reads it from their names.
        pattern: Patterns of file names in folders, e.g. '*.py' '*.md'.
        text_key: Field that holds a document's text.
        max_malformed: Largest share of records that may be malformed or lack their text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = BYTE_VALUES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size {vocab_size} is below {smallest}, 256 bytes and the special tokens"
        )
    if not 0 <= max_malformed <= 1:
        raise UserError(f"max_malformed {max_malformed} must lie in [0, 1]")
    documents = find_documents(inputs, format=format, pattern=pattern)
    require_local(output, "output")
    output = Path(output)
    output = output / TOKENIZER_NAME if output.is_dir() else output
    if output.exists():  # its runs and sources could no longer be read
        raise UserError(f"output {output} exists already: give another path, or remove it")
    with _writing(output):  # before the training, which may take long
        output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.pre_tokenizer = words  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents, words, text_key, max_malformed), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} cannot be filled from this text, only "
            f"{tokenizer.get_vocab_size()} tokens were found: lower it or add text"
        )
    with _writing(output):
        output.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return output


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"output {output} cannot be written ({error.strerror})") from error


def _texts(
    documents: Documents, words: "PreTokenizer", text_key: str, max_malformed: float
) -> Iterator[str]:
    """Yield the texts of documents without long words; count at the end what was dropped."""
    from titan_loop.data.prepare.readers import (
        DROPPED_BY_READERS,
        document_reader,
        report_dropped,
    )

    characters = left_out = 0
    said = time.monotonic()
    with TemporaryDirectory() as folder:
        paths = Path(folder) / "inputs.txt"
        reader = document_reader(documents.files, paths_file=paths, text_key=text_key, chat=None)
        for number, document in enumerate(reader.run(), start=1):
            parts = without_long_words(document.text, words)
            yield from parts
            characters += len(document.text)
            left_out += len(document.text) - sum(map(len, parts))
            if time.monotonic() - said >= _PROGRESS_SECONDS:
                said = time.monotonic()
                logger.info("%d documents, %.1f M characters read", number, characters / 1e6)
    counts = Counter({name: int(value.total) for name, value in reader.stats.stats.items()})
    reasons = {kind: counts[kind] for kind in DROPPED_BY_READERS if counts[kind]}
    report_dropped("tokenizer inputs", counts, max_malformed, reasons)
    if left_out:
        logger.warning(
            f"tokenizer inputs: {left_out} characters were left out, of words of more than {LEARNT}"
        )
    logger.info("%.1f M characters read; merging", characters / 1e6)


def without_long_words(text: str, words: "PreTokenizer") -> list[str]:
    """Cut a text inside its long words, as `words` splits it; `LEARNT` characters are kept."""
    long_words = [
        (run.start() + first, run.start() + last)
        for run in _RUNS.finditer(text)
        for _, (first, last) in words.pre_tokenize_str(run[0])
        if last - first > LONGEST_WORD
    ]
    parts: list[str] = []
    done = 0
    for first, last in long_words:
        kept = min(last, first + LEARNT)
        places = [done, *range(first + _CUT_LENGTH, kept, _CUT_LENGTH), kept]
        parts += [text[a:b] for a, b in pairwise(places)]
        done = last
    return [*parts, text[done:]]
