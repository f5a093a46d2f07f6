"""A row that shares the engine with other rows gets the tokens that it would get alone."""

import pytest

from tests.contracts.families import cases, random_model
from tests.inference.reference import CONTEXT, prompts
from tests.serve.conftest import Answer, until
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import QExit, StaticStep
from titan_loop.inference.rows import Request
from titan_loop.serve.rows import RowSettings, ServingEngine
from titan_loop.serve.scheduler import Scheduler


@pytest.mark.parametrize("name", {name.split("/")[0]: name for name in cases("generated")}.values())
def test_served_rows_write_what_they_write_alone(name):
    """Rows of several depths and policies share two places; other prompts join midway."""
    options, leaves, steps = cases("generated")[name]
    model = random_model(options, CONTEXT)
    engine = ServingEngine(model, recurrent_steps=steps)
    policies = [StaticStep(), StaticStep(1), leaves or QExit(0.7)]
    settings = [RowSettings(recurrent_steps=steps, exit_policy=each) for each in policies]
    requests = [Request(prompt=prompt, max_new_tokens=8) for prompt in prompts(9, 2, 6)]
    scheduler = Scheduler(engine, rows=2, queue=2)
    answers = [Answer(engine, *each) for each in zip(requests, settings, strict=True)]
    scheduler.submit([answer.row for answer in answers])
    until(lambda: all(answer.is_done for answer in answers))
    scheduler.join()
    for answer, request, each in zip(answers, requests, settings, strict=True):
        alone = Engine(model, recurrent_steps=steps, exit_policy=each.exit_policy)
        (expected,) = alone.complete([request])
        assert (answer.tokens, answer.steps) == (expected.tokens, expected.steps)
