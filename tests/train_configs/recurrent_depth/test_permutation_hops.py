"""Permutation hops: paths are followed again; what is asked is held out before training draws."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.task import Task
from train_configs.recurrent_depth.permutation_hops import PermutationHops

SMALL = PermutationHops(entities=12, relations=6, hops=4, asked_hops=6, trained_questions=300)


def told(task: Task, question: Any) -> tuple[int, list[int], int]:
    """First entity, relations and answer, from the tokens alone."""
    example = task.encode(question)
    entity, *relations, answer = example.tokens.tolist()
    graded = [label for label in example.answer_labels().tolist() if label != IGNORED]
    assert graded == [answer]
    return entity, relations, answer


@pytest.fixture(scope="module")
def world() -> dict[int, dict[int, int]]:
    """Relation's token → entity → entity, as the facts of training say."""
    facts: dict[int, dict[int, int]] = {}
    for question in islice(SMALL.questions(key=0, level=0), 6000):
        entity, relations, answer = told(SMALL, question)
        if len(relations) == 1:
            facts.setdefault(relations[0], {})[entity] = answer
    return facts


def test_relations_are_permutations_and_all_facts_are_trained(world):
    assert set(world) == set(range(12, 18))
    for relation in world.values():
        assert set(relation) == set(relation.values()) == set(range(12))
    assert len({tuple(sorted(relation.items())) for relation in world.values()}) == 6
    other = PermutationHops(entities=12, relations=6, graph_seed=1)
    assert (other.tails != SMALL.tails).any()


def test_every_answer_is_reached_by_walking(world):
    asked = [q for at in SMALL.strata.values() for q in SMALL.held_out_questions(50, at)]
    for question in [*islice(SMALL.questions(key=1, level=2), 500), *asked]:
        entity, relations, answer = told(SMALL, question)
        for relation in relations:
            entity = world[relation][entity]
        assert entity == answer
        assert SMALL.reached(question)[-1] == answer
        assert SMALL.reached(question)[0] == world[relations[0]][question.entity]


def test_what_is_asked_is_never_trained():
    for hops in range(2, 7):
        asked = SMALL.held_out_questions(100, SMALL.strata[f"{hops}_hops"])
        assert {len(q.relations) for q in asked} == {hops}
        assert all(SMALL.is_held_out(q) for q in asked)
    trained = list(islice(SMALL.questions(key=3, level=2), 4000))
    assert not any(SMALL.is_held_out(q) for q in trained)
    assert SMALL.held_out_one_in == 16
    of_two_hops = {q for q in trained if len(q.relations) == 2}
    assert len(of_two_hops) > 150
    asked = set(SMALL.held_out_questions(1000, SMALL.strata["2_hops"]))
    assert len(asked) == pytest.approx(12 * 36 / 16, abs=5 * 5)


def test_a_level_has_one_hop_more_and_all_before_as_often_as_there_are_questions():
    for level in range(SMALL.levels):
        hops = [len(q.relations) for q in islice(SMALL.questions(key=4, level=level), 4000)]
        assert set(hops) == set(range(1, level + 3))
        share = 300 / (72 + 300 * (level + 1))
        assert hops.count(level + 2) / 4000 == pytest.approx(share, abs=0.04)  # five deviations
    often = replace(SMALL, fact_weight=5)
    hops = [len(q.relations) for q in islice(often.questions(key=4), 4000)]
    assert hops.count(1) / 4000 == pytest.approx(360 / 660, abs=0.04)
    assert [SMALL.level_strata(level) for level in range(3)] == [["2_hops"], ["3_hops"], ["4_hops"]]
    assert list(SMALL.strata) == [f"{hops}_hops" for hops in range(1, 7)]
    assert often.level_examples(0) == 660
