"""Two graphs: every answer is walked again, splits are disjoint, and φ is what was asked for."""

import itertools
from itertools import islice

import pytest

from titan_loop.data.labels import IGNORED
from train_configs.discoloop.task import Chain, TwoGraph

SMALL = TwoGraph(entities=40, relations=12, degree=5, hops=3, inferred_ratio=2.0)


def facts(task: TwoGraph) -> dict[tuple[int, int], int]:
    """(entity, relation) → entity, as the edges say."""
    return {
        (head, relation): tail for head, edges in enumerate(task.edges) for relation, tail in edges
    }


def every_chain(task: TwoGraph, graph: int, hops: int) -> list[Chain]:
    known, chains = facts(task), []
    for head in range(graph * task.entities, (graph + 1) * task.entities):
        for path in itertools.product(range(task.relations), repeat=hops):
            entities = [head]
            for relation in path:
                if (entities[-1], relation) not in known:
                    break
                entities.append(known[entities[-1], relation])
            else:
                chains.append(Chain(graph, tuple(entities), path))
    return chains


def test_every_answer_is_reached_by_walking():
    known = facts(SMALL)
    for question in islice(SMALL.questions(key=0), 500):
        entity = question.entities[0]
        for relation, following in zip(question.relations, question.entities[1:], strict=True):
            entity = known[entity, relation]
            assert entity == following


def test_training_is_facts_of_both_graphs_and_the_chosen_share_of_chains_of_a():
    trained = set(islice(SMALL.questions(key=3), 20_000))
    one_hop = {c for graph in (0, 1) for c in every_chain(SMALL, graph, 1)}
    assert {c for c in trained if len(c.relations) == 1} == one_hop  # missed once in 10^8 tests
    per_length = SMALL.inferred_ratio * len(one_hop) / 2 / 2
    for hops in (2, 3):
        chosen = {c for c in every_chain(SMALL, 0, hops) if not SMALL.is_held_out(c)}
        assert len(chosen) == pytest.approx(per_length, rel=0.25)  # five standard deviations
        assert {c for c in trained if len(c.relations) == hops} <= chosen
    assert all(SMALL.is_held_out(c) for c in every_chain(SMALL, 1, 2))


def test_training_finds_the_few_chains_that_it_has():
    few = TwoGraph(entities=40, relations=10, hops=3, inferred_ratio=0.2)
    trained = {len(chain.relations) for chain in islice(few.questions(key=1), 100)}
    assert trained == {1, 2, 3}  # one in a thousand chains of three hops is trained


def test_the_exam_has_a_stratum_for_every_split():
    exam = {name: SMALL.held_out_questions(50, at) for name, at in SMALL.strata.items()}
    assert list(exam) == ["atomic", "train_2", "id_2", "ood_2", "train_3", "id_3", "ood_3"]
    assert {q.graph for q in exam["atomic"]} == {0, 1}
    for name, questions in exam.items():
        kind, _, hops = name.partition("_")
        assert {len(q.relations) for q in questions} == {int(hops or 1)}
        assert {SMALL.is_held_out(q) for q in questions} == {kind in ("id", "ood")}
        assert kind == "atomic" or {q.graph for q in questions} == {int(kind == "ood")}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("symbolic", "e3 r1 r4 | e7"),
        ("direct", "e3 's r1 's r4 is | e7"),
        ("reverse", "Who is the r4 of the r1 of e3 ? Answer : | e7"),
    ],
)
def test_the_forms_of_a_question(form, text: str):
    task = TwoGraph(entities=10, relations=5, degree=2, inferred_ratio=1.0, form=form)
    example = task.encode(Chain(0, (3, 5, 7), (1, 4)))
    names = [*(f"e{i}" for i in range(20)), *(f"r{i}" for i in range(5))]
    names += ["'s", "is", "Who", "the", "of", "?", "Answer", ":"][: task.vocab_size - 25]
    words = [names[token] for token in example.tokens]
    assert " ".join([*words[:-1], "|", words[-1]]) == text
    assert len(words) == task.longest_example
    labels = example.answer_labels().tolist()
    assert labels == [IGNORED] * (len(words) - 2) + [7, IGNORED]


def test_waypoints_are_the_entities_on_the_way():
    chain = Chain(0, (3, 5, 7, 8), (1, 4, 0))
    for form, positions in (("symbolic", (1, 2, 3)), ("direct", (2, 4, 7)), ("reverse", (14,))):
        task = TwoGraph(entities=10, relations=5, degree=2, hops=3, inferred_ratio=1.0, form=form)
        tokens = task.encode(chain).tokens
        found = task.waypoints(chain)
        assert tuple(at for at, _ in found.values()) == positions
        assert [token for _, token in found.values()] == [5, 7, 8][-len(positions) :]
        for (at, _), relation in zip(found.values(), chain.relations, strict=False):
            assert form == "reverse" or at == positions[-1] or tokens[at] == 20 + relation
