"""Questions that visit the same people are trained, reported or tuned with together."""

from itertools import product

import pytest

from train_configs.physics.layered_paths import LayeredPaths
from train_configs.physics.layered_qa import LayeredQA, PathQuestion

SIZES = {"layers": 4, "people": 6, "relations": 4, "hops": 3, "trained_questions": 200}
SMALL = LayeredPaths(**SIZES, tuning_questions=60)


def visited(task: LayeredQA, question: PathQuestion) -> tuple[int, ...]:
    people = [question.person]
    for relation in question.relations:
        people.append(int(task.world[people[-1], relation]))
    return tuple(people)


def every(task: LayeredQA) -> list[PathQuestion]:
    found = []
    for person, path in product(range(task.people), product(range(task.relations), repeat=3)):
        reached = visited(task, PathQuestion(person, path, 0))[-1]
        found.append(PathQuestion(person, path, reached))
    return found


def paths(task: LayeredQA, stratum: str) -> set[tuple[int, ...]]:
    return {visited(task, question) for question in task.held_out_questions(2_000, stratum)}


def trained_paths(task: LayeredQA) -> set[tuple[int, ...]]:
    return {visited(task, question) for question in every(task) if not task.is_held_out(question)}


@pytest.mark.parametrize("more", range(6))
def test_no_reported_question_visits_the_people_of_a_trained_one_or_of_tuning(more: int):
    """The borders of the splits fall between two paths, and also into one."""
    sizes = {**SIZES, "trained_questions": 200 + more}
    task = LayeredPaths(**sizes, tuning_questions=60 + more)
    trained = trained_paths(task)
    reported, tuning = (paths(task, stratum) for stratum in ("held_out", "tuning"))
    assert trained.isdisjoint(reported | tuning)
    assert reported.isdisjoint(tuning)
    assert min(len(trained), len(reported), len(tuning)) > 20
    before = LayeredQA(**sizes)
    assert len(trained_paths(before) & paths(before, "held_out")) > 20


def test_exactly_the_asked_number_is_trained_and_an_exam_asks_a_path_once():
    assert sum(not SMALL.is_held_out(q) for q in every(SMALL)) == 200
    exam = SMALL.exam(500, strata=["held_out_3_hops"])["held_out_3_hops"]
    assert len(exam) == len(paths(SMALL, "held_out"))
