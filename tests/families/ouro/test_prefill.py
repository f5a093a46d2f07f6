"""Short prefills: exact at all steps, the engine's own rule below, and the verb on a run."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.evaluation.conftest import text_run  # noqa: F401
from tests.inference.reference import Reference, make_model, prompts
from titan_loop.cli.main import main
from titan_loop.data.labels import IGNORED
from titan_loop.families.ouro.prefill import continuation_nats
from titan_loop.inference.stack import Stack

STEPS, PROMPT = 3, 6


@torch.no_grad()
@pytest.mark.parametrize("prefill", [1, 2, 3])
def test_continuations_equal_a_float64_reference(prefill: int):
    model = make_model().double()
    (text,) = prompts(11)
    tokens = torch.tensor([text])
    labels = tokens.roll(-1)
    labels[0, -1] = IGNORED
    reference = Reference(model, "full", prefill)
    reference.prompt(text[:PROMPT])
    reference.kept.pop()
    want = 0.0
    for place in range(PROMPT - 1, len(text) - 1):
        last = reference.token(text[place], STEPS)[-1]
        want += float(F.cross_entropy(reference.logits(last), torch.tensor(text[place + 1])))
    (got,) = continuation_nats(Stack(model), tokens, labels, PROMPT, prefill, STEPS)
    assert got == pytest.approx(want, abs=1e-4)  # the loss itself is taken in fp32
    if prefill == STEPS:
        logits = model.readout(model(tokens).hidden_RBLD[-1])[0]
        whole = F.cross_entropy(logits, labels[0], ignore_index=IGNORED, reduction="none")
        assert got == pytest.approx(float(whole[PROMPT - 1 :].sum()), abs=1e-4)


def test_the_verb_writes_a_row_for_every_step(text_run: Path, capsys):  # noqa: F811
    assert main(["analyse", "prefill", str(text_run), "--windows", "2"]) == 0
    (record,) = (text_run / "evals").glob("prefill-step-*.json")
    results = json.loads(record.read_text())["results"]
    bits = {name: value for name, value in results.items() if "bits_per_byte" in name}
    assert [name.rpartition(":")[2] for name in bits] == ["1", "2", "3", "4"]
    assert "above all steps" in capsys.readouterr().out
    assert (text_run / "plots" / "prefill.png").exists()
