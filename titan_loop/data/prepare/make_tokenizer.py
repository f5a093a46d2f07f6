"""Make a `tokenizer.json`: train a byte-level BPE."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_loop.data.prepare.documents import Format, Inputs, find_documents
from titan_loop.data.prepare.training_texts import training_texts
from titan_loop.errors import UserError
from titan_loop.storage.file_names import require_local
from titan_loop.text.tokenizer import BYTE_VALUES, SPECIAL_TOKENS, TOKENIZER_NAME


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
    texts = training_texts(documents, words, text_key=text_key, max_malformed=max_malformed)
    tokenizer.train_from_iterator(texts, trainer)
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
