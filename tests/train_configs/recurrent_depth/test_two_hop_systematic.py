"""Two hops over one graph: answers are walked again; training never composes OOD facts."""

from itertools import islice

import pytest

from tests.train_configs.recurrent_depth.test_permutation_hops import told
from train_configs.recurrent_depth.two_hop_systematic import TwoHopSystematic

SMALL = TwoHopSystematic(entities=30, relations=9, degree=5, ood_share=0.2, inferred_ratio=2.0)


@pytest.fixture(scope="module")
def world() -> dict[tuple[int, int], int]:
    """(head, relation's token) → tail, as the atomic facts of training say."""
    facts = {}
    for question in islice(SMALL.questions(key=0), 8000):
        entity, relations, answer = told(SMALL, question)
        if len(relations) == 1:
            facts[entity, relations[0]] = answer
    assert len(facts) == 30 * 5  # one of 150 is missed once in 10^8 tests
    return facts


def test_every_answer_is_reached_by_walking(world):
    exam = [q for at in SMALL.strata.values() for q in SMALL.held_out_questions(200, at)]
    for question in [*islice(SMALL.questions(key=1), 500), *exam]:
        entity, relations, answer = told(SMALL, question)
        reached = [entity := world[entity, relation] for relation in relations]
        assert reached[-1] == answer
        # The bridge is known where the first relation is read.
        bridge = SMALL.waypoints(question).get("bridge")
        assert bridge == ((1, reached[0]) if len(relations) == 2 else None)


def test_splits_by_the_facts_that_training_composes():
    """Enumerates all questions of two hops: 150 · 5; 120 facts are not OOD."""
    heads_of = {fact: fact // 5 for fact in range(150)}
    tails = SMALL.edges[1].tolist()
    every = [(f, g) for f in range(150) for g in range(150) if heads_of[g] == tails[f]]
    assert len(every) == 750
    asked = {name: set(SMALL.held_out_questions(4000, at)) for name, at in SMALL.strata.items()}
    drawn = {q for q in islice(SMALL.questions(key=2), 20_000) if len(q) == 2}
    assert drawn == asked["train_2"]  # 4,000 draws miss one of 240 once in 10^5 tests
    assert len(drawn) == 2 * 120
    composed = {fact for question in drawn for fact in question}
    ood = {fact for question in asked["ood_2"] for fact in question}
    assert len(composed) > 90
    assert not composed & ood
    composable = {fact for name in ("train_2", "id_2") for q in asked[name] for fact in q}
    assert len(composable | ood) <= 150
    assert composable & ood == set()
    assert asked["train_2"] | asked["id_2"] == {
        (f, g) for f, g in every if f in composable and g in composable
    }
    assert {SMALL.is_held_out(q) for q in drawn | asked["atomic"]} == {False}
    mixed = [q for q in every if (q[0] in ood) != (q[1] in ood)]
    assert mixed
    assert all(SMALL.is_held_out(q) for q in [*asked["id_2"], *asked["ood_2"], *mixed])


def test_the_papers_sizes():
    task = TwoHopSystematic()
    sizes = {name: len(numbers) for name, numbers in task._splits.items()}
    assert sizes["atomic"] == 40_000
    assert sizes["train"] == 273_600
    assert sizes["ood"] == pytest.approx(2000, rel=0.25)  # "nearly 2k"
