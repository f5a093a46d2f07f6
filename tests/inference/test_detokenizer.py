"""Text streams: nothing shown too early, nothing lost, stop strings wherever tokens cut them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.data.shapes.tokenizers import sentencepiece
from tests.inference.reference import make_model
from titan_loop.errors import UserError
from titan_loop.inference.detokenizer import Detokenizer
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import QExit
from titan_loop.inference.rows import Completion, Request, text_requests
from titan_loop.inference.sampling import Sampling
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.text.tokenizer import END_OF_TEXT


def byte_tokenizer(letters: str = "") -> Tokenizer:
    """One token a byte, or only the given letters; the end of text comes last."""
    alphabet = letters or sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


TOKENIZER = byte_tokenizer()


def feed(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return the pieces a stream gives for the bytes of `text`, and whether it stopped."""
    stream = Detokenizer(TOKENIZER, stop)
    pieces = []
    for token in TOKENIZER.encode(text).ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.rest()], stream.stopped


@given(
    st.text(alphabet="ab\né漢🙂", max_size=20),
    st.lists(st.text(alphabet="ab\né漢🙂", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300)
def test_the_text_ends_before_the_first_stop_string(text, stop):
    pieces, stopped = feed(text, tuple(stop))
    # The first to be complete, and among those that complete together the earliest to begin.
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert ("".join(pieces), stopped) == (text, False)
        return
    complete = text[: min(ends)]
    assert stopped
    assert "".join(pieces) == complete[: min(complete.find(s) for s in stop if s in complete)]


def test_half_a_character_is_kept_special_tokens_are_not_and_stops_are_not_empty():
    stream = Detokenizer(TOKENIZER)
    halves = TOKENIZER.encode("é").ids
    assert stream.push(TOKENIZER.token_to_id(END_OF_TEXT)) == ""
    assert stream.push(halves[0]) == ""
    assert stream.rest() == "\ufffd"
    with pytest.raises(UserError, match="stop='' would end"):
        Detokenizer(TOKENIZER, ("",))


def engine_of(**options) -> Engine:
    return Engine(make_model(vocab_size=8).double(), **options)


def ask(prompts: list[str], **options) -> list[Request]:
    tokenizer = byte_tokenizer("abcdef")
    stop_tokens = frozenset((tokenizer.token_to_id(END_OF_TEXT),))
    return text_requests(tokenizer, prompts, stop_tokens=stop_tokens, **options)


@pytest.mark.parametrize(
    "options", [{}, {"exit_policy": QExit(0.6)}, {"speculation": SelfSpeculation(1, 3)}]
)
def test_generation_stops_at_strings_that_several_tokens_make(options):
    free = engine_of(**options).complete(ask(["abc", "f"], max_new_tokens=20))
    text = free[0].text
    assert len(text) == len(free[0].tokens) >= 5
    stop = text[2:4]
    got = engine_of(**options).complete(ask(["abc", "f"], max_new_tokens=20, stop=[stop]))
    assert got[0].text == text[: text.find(stop)]
    assert got[0].finish == "stop_string"
    assert len(got[0].tokens) == text.find(stop) + 2  # the tokens say what was computed


def test_a_stream_gives_the_same_as_completing():
    engine = engine_of(exit_policy=QExit(0.6))

    def arguments() -> dict:
        return {
            "requests": ask(["abc", "fade"], max_new_tokens=9, stop=["aa"]),
            "sampling": Sampling(temperature=1.0),
            "generator": torch.Generator().manual_seed(2),
        }

    whole = engine.complete(**arguments())
    collected = [Completion(), Completion()]
    order = []
    for event in engine.stream(**arguments()):
        collected[event.row].add(event)
        order.append(event.row)
    assert collected == whole
    assert engine.complete(**arguments(), rows=1) == whole
    assert order[:2] == [0, 1]


def test_a_byte_that_is_no_character_after_one_that_is_loses_nothing():
    """`ByteFallback` then replaces every byte of the run, even those already returned."""
    tokenizer = sentencepiece()
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(tokenizer.token_to_id(name)) for name in ("<0x0A>", "<0xE2>", "x", "y")]
    assert pieces == ["\n", "", "\ufffdx", "y"]
    assert stream.rest() == ""


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_text_goes_on_after_its_prompt(cut):
    """SentencePiece's decoder drops the first space of a text, not of a completion."""
    tokenizer = sentencepiece()
    text = "the 漢字 cat\n  sat"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = Detokenizer(tokenizer, before=ids[:cut])
    completion = "".join([*map(stream.push, ids[cut:]), stream.rest()])
    before = tokenizer.decode(ids[:cut])
    if "\ufffd" not in before:
        assert before + completion == text
    alone = Detokenizer(tokenizer)
    assert "".join([*map(alone.push, ids), alone.rest()]) == text
