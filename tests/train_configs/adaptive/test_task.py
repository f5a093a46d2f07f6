"""Mano beside Capo: shares, a vocabulary of both, and a run on it from start to record."""

from itertools import islice

import pytest

from tests.train_configs.physics.test_capo import SMALL, check_bits
from titan_loop.data.labels import IGNORED
from titan_loop.data.tasks.mano import Mano
from train_configs.adaptive.task import ManoCapo

BOTH = ManoCapo(mano=Mano(modulus=5, max_operations=3), capo=SMALL, mano_share=0.25)


def test_an_oracle_and_a_uniform_model_know_the_bits_of_the_formula():
    check_bits(BOTH, BOTH.mano.vocab_size)


def test_mano_and_capo_are_mixed_by_their_share_without_a_common_token():
    drawn = list(islice(BOTH.questions(key=1), 4000))
    manos = [question for question in drawn if question.task == "mano"]
    # Binomial: a deviation of 27, five of them.
    assert len(manos) == pytest.approx(1000, abs=137)
    tokens = {name: set() for name in ("mano", "capo")}
    for question in drawn:
        example = BOTH.encode(question)
        used = {*example.tokens.tolist(), *(x for x in example.labels.tolist() if x != IGNORED)}
        tokens[question.task] |= used
    assert not tokens["mano"] & tokens["capo"]
    assert max(tokens["capo"]) < BOTH.vocab_size
    alone = BOTH.mano.encode(manos[0].of_task)
    assert (BOTH.encode(manos[0]).tokens == alone.tokens).all()
    exam = BOTH.exam(20)
    assert [*exam] == ["mano", "names", "values"]
    held_out = [
        BOTH.mano.is_held_out(q.of_task) for q in BOTH.held_out_questions(20, BOTH.strata["mano"])
    ]
    assert all(held_out)
    assert not any(BOTH.mano.is_held_out(question.of_task) for question in manos)
