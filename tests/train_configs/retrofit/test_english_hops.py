"""Hops in English: the graph of `PermutationHops`, told in a tokenizer's words."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from titan_loop.data.labels import IGNORED
from titan_loop.errors import UserError
from train_configs.recurrent_depth.permutation_hops import Path
from train_configs.retrofit.english_hops import (
    _WORDS,
    NAMES,
    RELATIONS,
    EnglishHops,
    Told,
    ToldHops,
)


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


def lines_of(task: ToldHops, question: Told) -> list[list[str]]:
    """Return the words of every line; the task must have no tokenizer."""
    lines: list[list[str]] = []
    for token in task.encode(question).tokens.tolist():
        lines += [[]] if _WORDS[token] == "The" else []
        lines[-1].append(_WORDS[token])
    return lines


def test_told_facts_lead_to_every_answer():
    """Look up every hop in a dictionary of the told lines."""
    task = ToldHops(told_questions=4)
    generated = task.questions(0)
    told = []
    for question in (next(generated) for _ in range(50)):
        lines = lines_of(task, question)
        asked, facts = lines[-4:], lines[:-4]
        known = {(fact[1], fact[3]): fact[5] for fact in facts}  # The R of X is Y
        assert len(known) == len(facts) == task.entities * task.relations
        told.append([*known.items()])
        for path, line in zip(question.paths, asked, strict=True):
            *named, name = [word for word in line[:-2] if word not in ("The", "the", "of")]
            for relation in reversed(named):
                name = known[relation, name]
            assert name == line[-1]
            assert len(named) == len(path.relations) <= task.hops
        example = task.encode(question)
        graded = [_WORDS[label] for label in example.answer_labels().tolist() if label != IGNORED]
        assert graded == [line[-1] for line in asked]
        assert len(example.tokens) <= task.longest_example
        assert facts != sorted(facts)
    assert len({len(path.relations) for _ in range(50) for path in next(generated).paths}) == 3
    assert len({tuple(sorted(facts)) for facts in told}) == 50  # another graph every time
    assert len({tuple(key for key, _ in facts) for facts in told}) == 50  # in another order


def test_the_exam_of_told_facts_asks_one_question_of_a_graph_that_is_not_trained(tokenizer):
    task = ToldHops(tokenizer=tokenizer)
    for name, stratum in task.strata.items():
        for question in task.held_out_questions(10, stratum):
            ((_, relations),) = question.paths
            assert name == f"{len(relations)}_hops"
            assert task.is_held_out(question)
    trained = task.questions(0)
    assert not any(task.is_held_out(next(trained)) for _ in range(300))
    words = Tokenizer.from_file(tokenizer)
    (question,) = task.held_out_questions(1, task.strata["2_hops"])
    tokens = task.encode(question).tokens.tolist()
    assert "".join(words.id_to_token(token) for token in tokens).count("Ġis") == 8 * 3 + 1
