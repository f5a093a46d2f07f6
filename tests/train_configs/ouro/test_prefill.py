"""Short prefills: exact at all steps, the engine's own rule below, and the verb on a run."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.evaluation.conftest import text_run  # noqa: F401
from tests.inference.reference import Reference, make_model, prompts
from tests.support.tiny import SEQ_LEN
from titan_loop.cli.main import main
from titan_loop.data.labels import IGNORED
from titan_loop.evaluation.window_scores import open_run
from titan_loop.inference.loading import load_checkpoint
from titan_loop.inference.stack import Stack
from train_configs.ouro.prefill import continuation_nats

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
    # After a prompt at all steps the continuation, from the prompt's last token on, is as usual.
    loaded = load_checkpoint(text_run)
    (found,) = open_run(loaded.run, count=2).values()
    with torch.no_grad():
        output = loaded.model(found.input, torch.arange(SEQ_LEN)[None], recurrent_steps=4)
        logits = loaded.model.readout(output.hidden_RBLD[-1])[:, SEQ_LEN // 2 - 1 :]
    labels = found.labels[:, SEQ_LEN // 2 - 1 :]
    nats = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    n_bytes = int(found.label_bytes[:, SEQ_LEN // 2 - 1 :].sum())
    want = nats.item() / math.log(2) / n_bytes
    (name,) = (name for name in bits if name.endswith(":4"))
    assert bits[name] == pytest.approx(want, rel=1e-5)
