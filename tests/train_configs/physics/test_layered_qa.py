"""Layered questions: every answer is followed again, and exactly the asked number is trained."""

from itertools import islice, product

from train_configs.physics.layered_qa import LayeredQA, PathQuestion

SMALL = LayeredQA(layers=4, people=6, relations=4, hops=3, trained_questions=60)


def follow(task: LayeredQA, person: int, relations: tuple[int, ...]) -> int:
    for relation in relations:
        layer, person = person // task.people, int(task.world[person, relation])
        assert person // task.people == layer + 1
    return person


def questions(task: LayeredQA) -> list[PathQuestion]:
    paths = product(range(task.people), product(range(task.relations), repeat=task.hops))
    return [PathQuestion(person, path, follow(task, person, path)) for person, path in paths]


def test_facts_and_exactly_the_chosen_questions_are_trained():
    """6,000 draws among 132 examples miss one once in 10^17 tests."""
    draws = [*islice(SMALL.questions(key=0), 6000)]
    shares = sum(len(q.relations) == 1 for q in draws) / len(draws)
    assert abs(shares - 72 / 132) < 0.04  # six standard errors
    drawn = set(draws)
    facts = {
        PathQuestion(person, (relation,), follow(SMALL, person, (relation,)))
        for person in range(18)
        for relation in range(4)
    }
    assert {q for q in drawn if len(q.relations) == 1} == facts
    trained = {q for q in questions(SMALL) if not SMALL.is_held_out(q)}
    assert len(trained) == SMALL.trained_questions
    assert drawn - facts == trained


def test_the_exam_asks_facts_trained_and_other_questions():
    exam = {name: SMALL.held_out_questions(2000, at) for name, at in SMALL.strata.items()}
    assert list(exam) == ["facts", "trained_3_hops", "held_out_3_hops"]
    others = {q for q in questions(SMALL) if SMALL.is_held_out(q)}
    assert set(exam["held_out_3_hops"]) <= others
    assert len(set(exam["held_out_3_hops"])) > 300  # of 324
    assert len(set(exam["trained_3_hops"])) == SMALL.trained_questions
    assert {len(q.relations) for q in exam["facts"]} == {1}


def test_the_paper_has_800_000_questions_of_which_3_000_can_be_held_out():
    task = LayeredQA(trained_questions=797_000)
    drawn = set(task.held_out_questions(20_000, "held_out"))
    assert 2900 < len(drawn) <= 3000


def test_a_question_in_tokens_names_its_last_relation_first():
    assert SMALL.world.shape == (18, 4)
    question = PathQuestion(3, (1, 2, 0), follow(SMALL, 3, (1, 2, 0)))
    *prompt, answer = SMALL.encode(question).tokens.tolist()
    who, is_, the, last, of = prompt[:5]
    relations = [24 + relation for relation in (0, 2, 1)]
    assert prompt[:-4] == [who, is_, *(t for r in relations for t in (the, r, of))]
    assert (last, prompt[-4], answer) == (24, 3, question.answer)
    assert len(prompt) + 1 == SMALL.longest_example
    fact = SMALL.encode(PathQuestion(3, (1,), follow(SMALL, 3, (1,)))).tokens.tolist()
    assert fact[1:4] == [25, of, 3]
    words = {*fact, *prompt} - {*relations, 3, fact[-1]}
    assert words == {*range(28, SMALL.vocab_size)}
