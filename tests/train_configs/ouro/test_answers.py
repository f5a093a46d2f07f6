"""How answers form over steps: the definitions, planted signals, and the verb on a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.inference.conftest import byte_level_tokenizer
from tests.inference.reference import make_model
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from train_configs.ouro.answers import agreement, probe
from train_configs.ouro.items import Item, last_token_states, nats_of_choices, read_items

ITEMS = [Item(f"{a} and {b} make", ("one", "two", "six"), (a + b) % 3) for a in "12" for b in "34"
         for a, b in [(int(a), int(b))]]  # fmt: skip


def test_agreement_counts_items_answered_alike():
    assert agreement(np.array([[0, 0, 1], [1, 0, 0]])).tolist() == [[2, 1, 0], [1, 2, 1], [0, 1, 2]]


def test_choices_are_scored_as_separate_passes_score_them():
    model, tokenizer = make_model(vocab_size=300).double(), byte_level_tokenizer()
    nats = nats_of_choices(model, tokenizer, ITEMS, [1, 3])
    assert nats.shape == (len(ITEMS), 2, 3)
    for at, depth in enumerate((1, 3)):
        for index, item in enumerate(ITEMS):
            for number, choice in enumerate(item.choices):
                prompt = tokenizer.encode(item.text).ids
                answer = tokenizer.encode(f" {choice}").ids
                output = model(torch.tensor([prompt + answer]), recurrent_steps=depth)
                logits = model.readout(output.hidden_RBLD[-1])[0, len(prompt) - 1 : -1]
                picked = logits.log_softmax(-1)[range(len(answer)), answer]
                assert nats[index, at, number] == pytest.approx(-picked.sum().item(), rel=1e-9)


def test_states_are_those_of_a_whole_pass():
    model, prompts = make_model(vocab_size=300), [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    states = last_token_states(model, prompts, 3)
    assert states.shape == (3, 3, len(model.layers), model.config.dim)
    for prompt, state in zip(prompts, states, strict=True):
        hidden = model.norm(torch.from_numpy(state[:, -1]))
        output = model(torch.tensor([prompt]), recurrent_steps=3, collect="all")
        expected = torch.stack([h[0, -1] for h in output.hidden_RBLD])
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)


def test_a_probe_finds_the_step_whose_states_hold_the_answer():
    random = np.random.default_rng(0)
    answers = random.integers(3, size=(150, 2))
    states = random.normal(size=(150, 2, 1, 8)).astype(np.float32)
    states[np.arange(150), 1, 0, answers[:, 1]] += 4  # step 2 holds its own answer, step 1 nothing
    scores = {(s.state_step, s.answer_step): s for s in probe(states, answers)}
    assert scores[2, 2].auc > 0.95
    assert scores[2, 2].low > 0.9
    for pair in ((1, 1), (1, 2), (2, 1)):  # chance: 0.5 with a standard error below 0.04
        assert abs(scores[pair].auc - 0.5) < 0.15
        assert scores[pair].low < 0.55
    with pytest.raises(UserError, match="nothing to predict"):
        probe(states, np.zeros((150, 2), dtype=int))


def write_items(path: Path) -> Path:
    lines = [{"text": i.text, "choices": list(i.choices), "answer": i.answer} for i in ITEMS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_verb_leaves_a_record(own_run, tmp_path: Path, capsys):
    items = str(write_items(tmp_path / "items.jsonl"))
    assert main(["analyse", "agreement", str(own_run), "--items", items, "--depths", "1", "3"]) == 0
    assert "step 3" in capsys.readouterr().out
    record = json.loads((own_run / "evals" / "agreement-step-5.json").read_text())
    assert np.shape(record["answers"]) == (len(ITEMS), 2)
    assert np.diag(record["agreement"]).tolist() == [len(ITEMS)] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "choices": ["b", "c"], "answer": 2}\n', "answer=2 must be an index below"),
        (
            '{"text": "a", "choices": ["b", "c"]}\n{"text": "a", "choices": ["b", "c", "d"]}\n',
            "all with the same number",
        ),
        ("", "needs items"),
    ],
)
def test_items_that_cannot_be_asked_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_items(str(path))
