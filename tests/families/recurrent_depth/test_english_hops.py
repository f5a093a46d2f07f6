"""Hops in English: the graph of `PermutationHops`, told in a tokenizer's words."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError
from titan_loop.families.recurrent_depth.english_hops import _WORDS, NAMES, RELATIONS, EnglishHops
from titan_loop.families.recurrent_depth.permutation_hops import Path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """Return a tokenizer.json in which a word with the space before it is one token."""
    spaced = [f"Ġ{word}" for word in _WORDS]
    ids = {word: number for number, word in enumerate(["<unk>", *_WORDS, *spaced])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return str(path)


def said(task: EnglishHops, question: Path) -> str:
    words = Tokenizer.from_file(task.tokenizer)
    tokens = task.encode(question).tokens.tolist()
    return "".join(words.id_to_token(token) for token in tokens).replace("Ġ", " ")


def test_a_question_names_its_relations_from_the_last_to_the_first(tokenizer):
    task = EnglishHops(tokenizer=tokenizer)
    question = Path(3, (1, 0, 2))
    entity = 3
    for relation in question.relations:
        entity = int(task.tails[relation, entity])
    wanted = f"The rival of the friend of the teacher of {NAMES[3]} is {NAMES[entity]}"
    assert said(task, question) == wanted
    example = task.encode(question)
    graded = [label for label in example.answer_labels().tolist() if label != IGNORED]
    assert graded == [example.tokens[-1]]
    assert len(example.tokens) == 3 * 3 + 3 <= task.longest_example == 3 * 6 + 3


def test_without_a_tokenizer_every_word_is_an_id():
    task = EnglishHops()
    (answer,) = task.encode(Path(0, (1,))).tokens[-1:]
    words = [_WORDS[token] for token in task.encode(Path(0, (1,))).tokens[:-1]]
    assert words == ["The", "teacher", "of", "Anna", "is"]
    assert _WORDS[answer] == NAMES[int(task.tails[1, 0])]
    assert task.vocab_size == len(_WORDS)


def test_what_cannot_be_said_is_one_line(tokenizer, tmp_path):
    with pytest.raises(UserError, match=f"entities 99 must be at most {len(NAMES)}"):
        EnglishHops(entities=99)
    with pytest.raises(UserError, match=f"relations 9 must be at most {len(RELATIONS)}"):
        EnglishHops(relations=9)
    with pytest.raises(UserError, match=r"tokenizer nowhere\.json is not a file"):
        _ = EnglishHops(tokenizer="nowhere.json").vocab_size
    words = Tokenizer.from_file(tokenizer)
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    words.save(str(tmp_path / "letters.json"))
    with pytest.raises(UserError, match=r"splits Anna, .*: every name must be one token"):
        EnglishHops(tokenizer=str(tmp_path / "letters.json")).encode(Path(0, (0,)))
