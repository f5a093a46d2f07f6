"""The quick start's data: text of this Python installation, a tokenizer, three prepared sources."""

import logging
from collections.abc import Iterator
from pathlib import Path

from titan_loop.data.demo.local_python import CARD, DOMAINS, build_local_python_corpus
from titan_loop.data.prepare.make_tokenizer import train_tokenizer
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.source_card import CARD_NAME
from titan_loop.text.tokenizer import TOKENIZER_NAME

logger = logging.getLogger(__name__)


def demo_sources(
    output: Path = Path("corpora/quickstart"),
    *,
    code_megabytes: float = 12,
    prose_megabytes: float = 8,
    math_megabytes: float = 6,
    held_out_fraction: float = 0.05,
    vocab_size: int = 1024,
) -> Iterator[str]:
    """Build the quick start's sources from the text of this Python installation, without a network.

    What is complete is skipped, so the same command continues after an interruption.

    Args:
        output: Folder of text, tokenizer and sources; train quickstart reads the default.
        code_megabytes: Size of the code in 10**6 bytes of text; less if there is not so much.
        prose_megabytes: Size of the prose, likewise.
        math_megabytes: Size of the mathematics, likewise.
        held_out_fraction: Share of documents that are never trained on, in [0, 1).
        vocab_size: Number of tokens, special ones and the 256 bytes included.
    """
    text, tokenizer = output / "text", output / TOKENIZER_NAME
    if not (text / CARD).exists():
        sizes = {"code": code_megabytes, "prose": prose_megabytes, "math": math_megabytes}
        build_local_python_corpus(text, sizes, held_out_fraction=held_out_fraction)
    else:
        logger.info("%s is complete: to build it with other sizes, remove %s", text, output)
    if not tokenizer.exists():
        files = [text / domain / "train.jsonl" for domain in DOMAINS]
        train_tokenizer(files, vocab_size=vocab_size, output=tokenizer)
    for domain in DOMAINS:
        if not (output / domain / CARD_NAME).exists():
            tokenize_source(
                text / domain / "train.jsonl",
                held_out_inputs=text / domain / "held_out.jsonl",
                output=output / domain,
                tokenizer=tokenizer,
                licence="those of the installed packages",
            )
        yield str(output / domain)
