"""The exported folder in transformers: the same model, whatever the caller does with it.

Runs in environments with transformers 4.57.6 and 5.x, see tools/test_hf.sh.
"""

import ast
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.ouro.hugging_face.conftest import VOCABULARY, Exported
from tests.families.ouro.hugging_face.reference import run_reference
from tests.inference.reference import q_exit_steps
from titan_loop.models.decoder import LoopDecoder

# fp32 rounding through 2 layers and up to 5 steps, at states of size 1 and logits of size 10.
TOLERANCE = {"atol": 5e-5, "rtol": 1e-5}

EXITS = [{}, {"exit_at_step": 1}, {"exit_threshold": 0.45}, {"exit_threshold": 0.8}]


def load(transformers: ModuleType, folder: Path, **keywords: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, **keywords
    ).eval()


@pytest.fixture(scope="session", params=["plain", "grouped"])
def exported(request: pytest.FixtureRequest) -> Exported:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def loaded(transformers: ModuleType, exported: Exported) -> Any:
    return load(transformers, exported.folder)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def states_of(model: LoopDecoder, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return our states per step and exit logits (R, B, L)."""
    output = model(ids, recurrent_steps=model.recurrent_steps)
    return list(output.hidden_RBLD), torch.stack(output.exit_logit_RBL)


def our_logits(model: LoopDecoder, ids: Tensor, exits: dict[str, Any]) -> Tensor:
    """Return (B, L, V) logits, each token at the step our own gate arithmetic chooses."""
    hidden, exit_logit_RBL = states_of(model, ids)
    if "exit_threshold" in exits:
        step_BL = q_exit_steps(exit_logit_RBL, exits["exit_threshold"]) - 1
    else:
        step_BL = torch.full(ids.shape, exits.get("exit_at_step", len(hidden) - 1))
    rows, columns = torch.meshgrid(*map(torch.arange, ids.shape), indexing="ij")
    return model.readout(torch.stack(hidden)[step_BL, rows, columns])


def layer_calls(model: Any) -> list[tuple[int, int]]:
    """Return a list that grows by the (B, L) input of the first layer at every call."""
    calls: list[tuple[int, int]] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, arguments: calls.append(tuple(arguments[0].shape[:2]))
    )
    return calls


def test_it_agrees_with_ours_and_with_the_reference_at_every_step(loaded, exported):
    ids = tokens(2, 21)
    hidden, exit_logit_RBL = states_of(exported.model, ids)
    references = [run_reference(exported.folder, row.tolist()) for row in ids]
    output = loaded(ids, output_hidden_states=True)
    assert len(output.hidden_states) == len(hidden) == loaded.config.total_ut_steps
    for step, ours in enumerate(hidden):
        at_step = loaded(ids, exit_at_step=step)
        theirs = (output.hidden_states[step], output.exit_logits[..., step], at_step.logits)
        of_ours = (ours, exit_logit_RBL[step], exported.model.readout(ours))
        of_reference = [torch.stack([getattr(r, name)[step] for r in references]).float()
                        for name in ("hidden", "exit_logits", "logits")]  # fmt: skip
        for expected in (of_ours, of_reference):
            torch.testing.assert_close(theirs, expected, **TOLERANCE)
        assert at_step.exit_steps.unique().tolist() == [step]
    torch.testing.assert_close(output.logits, our_logits(exported.model, ids, {}), **TOLERANCE)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.7, 0.95, 1.0])
def test_a_threshold_reads_each_token_where_our_gate_does(loaded, exported, threshold):
    ids = tokens(3, 25, seed=1)
    _, exit_logit_RBL = states_of(exported.model, ids)
    expected = q_exit_steps(exit_logit_RBL, threshold) - 1
    output = loaded(ids, exit_threshold=threshold)
    assert torch.equal(output.exit_steps, expected)
    if 0.3 < threshold < 0.95:
        assert len(expected.unique()) > 1  # else this would show nothing
    ours = our_logits(exported.model, ids, {"exit_threshold": threshold})
    torch.testing.assert_close(output.logits, ours, **TOLERANCE)


@pytest.mark.parametrize("first", [None, 40])  # position of the first token, if it is given
@pytest.mark.parametrize("exits", EXITS, ids=str)
def test_cached_is_uncached(loaded, exits, first):
    ids = tokens(2, 20, seed=2)

    def given(start: int, end: int) -> dict[str, Any]:
        where = {} if first is None else {"position_ids": torch.arange(start, end)[None] + first}
        return {"input_ids": ids[:, start:end], **where, **exits}

    whole = loaded(**given(0, 20), use_cache=False)
    cache, logits, steps = None, [], []
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 13), *((i, i + 1) for i in range(13, 20))):
        part = loaded(**given(start, end), past_key_values=cache, use_cache=True)
        cache = part.past_key_values
        logits.append(part.logits)
        steps.append(part.exit_steps)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole.logits, **TOLERANCE)
    assert torch.equal(torch.cat(steps, dim=1), whole.exit_steps)


def test_tokens_that_exited_early_catch_up_exactly(loaded):
    ids = tokens(2, 16, seed=3)
    whole = loaded(ids, use_cache=False)
    calls = layer_calls(loaded)
    cache = loaded(ids[:, :8], use_cache=True, exit_at_step=0).past_key_values
    cache = loaded(ids[:, 8:11], past_key_values=cache, exit_at_step=1).past_key_values
    cache = loaded(ids[:, 11:12], past_key_values=cache, exit_at_step=0).past_key_values
    last = loaded(ids[:, 12:], past_key_values=cache)
    torch.testing.assert_close(last.logits, whole.logits[:, 12:], **TOLERANCE)
    deeper = loaded.config.total_ut_steps - 2
    assert [length for _, length in calls] == [8, 3, 11, 1, 4, 5, *[16] * deeper]


@pytest.mark.parametrize("exits", EXITS, ids=str)
def test_a_left_padded_batch_is_each_row_alone(loaded, exits):
    lengths = (5, 14, 9)
    rows = [tokens(1, length, seed=length) for length in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (14 - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * (14 - length) + [1] * length for length in lengths])
    together = loaded(ids, attention_mask=mask, **exits)
    answer = loaded.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **exits)
    assert answer.shape == (3, 20)
    for index, row in enumerate(rows):
        real = slice(14 - row.shape[1], None)
        alone = loaded(row, **exits)
        torch.testing.assert_close(together.logits[index, real], alone.logits[0], **TOLERANCE)
        generated = loaded.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=6, do_sample=False, **exits
        )
        assert answer[index, 14:].tolist() == generated[0, row.shape[1] :].tolist()


def test_packed_documents_do_not_see_each_other(loaded):
    """Positions that start again separate them."""
    first, second = tokens(1, 10, seed=2), tokens(1, 6, seed=3)
    positions = torch.cat([torch.arange(10), torch.arange(6)])[None]
    packed = loaded(torch.cat([first, second], dim=1), position_ids=positions, use_cache=False)
    for part, alone in ((slice(10), first), (slice(10, None), second)):
        torch.testing.assert_close(packed.logits[:, part], loaded(alone).logits, **TOLERANCE)


@pytest.mark.parametrize("exits", EXITS, ids=str)
def test_generation_is_greedy_decoding_of_our_model(loaded, exported, exits):
    ids = tokens(2, 6, seed=5)
    expected = ids
    for _ in range(8):
        best = our_logits(exported.model, expected, exits)[:, -1].argmax(dim=-1)
        expected = torch.cat([expected, best[:, None]], dim=1)
    assert not (expected[:, 6:] <= 2).any()  # nobody stopped
    mask = torch.ones_like(ids)
    for cached in (True, False):
        answer = loaded.generate(
            ids, attention_mask=mask, max_new_tokens=8, use_cache=cached, **exits
        )
        assert answer.tolist() == expected.tolist()


def test_beam_search_reorders_the_cache(loaded):
    ids = tokens(2, 6, seed=6)
    keywords = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "num_beams": 3}
    for exits in EXITS:
        cached = loaded.generate(ids, **keywords, **exits)
        assert (
            cached.tolist() == loaded.generate(ids, use_cache=False, **keywords, **exits).tolist()
        )


def test_steps_are_skipped_once_the_whole_batch_has_exited(transformers, plain):
    model = load(transformers, plain.folder)
    gate = model.model.early_exit_gate
    gate.weight.zero_()
    gate.weight[0, 0] = 100.0  # rows whose states are positive there exit at once, others never
    calls = layer_calls(model)
    ids = torch.arange(3, VOCABULARY)[:, None]
    exits = model(ids, exit_threshold=0.5).exit_steps[:, 0]
    at_once, never = ids[exits == 0][:4], ids[exits == 2][:4]
    assert len(at_once) == len(never) == 4
    for batch, steps in ((at_once, 1), (never, 3), (torch.cat([at_once, never]), 3)):
        calls.clear()
        model(batch, exit_threshold=0.5)
        assert len(calls) == steps
    calls.clear()
    gate.bias.fill_(1e4)
    model.generate(
        ids[:2], attention_mask=torch.ones_like(ids[:2]), max_new_tokens=5, exit_threshold=0.99
    )
    assert calls == [(2, 1)] * 5


def test_the_loss_is_that_of_the_logits_and_trains_every_parameter(loaded):
    ids = tokens(2, 12, seed=11)
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.enable_grad():
        output = loaded(ids, labels=labels)
        output.loss.backward()
    log_pmf = output.logits[:, :-1].log_softmax(dim=-1)
    nats = -log_pmf.gather(-1, ids[:, 1:, None]).squeeze(-1)
    expected = torch.cat([nats[0, 3:], nats[1]]).mean()
    torch.testing.assert_close(output.loss, expected)
    # A trainer that accumulates gradients divides by the targets of all micro-batches.
    part = loaded(ids, labels=labels, num_items_in_batch=torch.tensor(2 * 19)).loss
    torch.testing.assert_close(part, expected / 2)
    untrained = {name for name, parameter in loaded.named_parameters() if parameter.grad is None}
    assert untrained == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    loaded.zero_grad()
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == loaded.config.tie_word_embeddings


def test_the_example_on_the_card_runs(transformers, exported, monkeypatch, capsys):
    monkeypatch.chdir(exported.folder.parent)
    card = (exported.folder / "README.md").read_text()
    used = card.split("## Use\n")[1].split("\n`generate`")[0]
    exec(compile(textwrap.dedent(used), "README.md", "exec"), {})
    (answer,) = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    asked = "<|im_start|>user\nHello!" if "apply_chat_template" in used else "Once upon a time"
    assert answer.startswith(asked)
    assert len(answer) > len(asked)


@pytest.mark.parametrize(("kind", "stops"), [("plain", [0]), ("grouped", [2, 0])])
def test_generation_stops_at_the_right_token(transformers, request, kind, stops):
    folder = request.getfixturevalue(kind).folder
    ids = tokens(1, 4)
    for token in (0, 2):
        model = load(transformers, folder)
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, 64))
        bias = torch.zeros(VOCABULARY).index_fill_(0, torch.tensor([token]), 1.0)
        model.lm_head.bias = torch.nn.Parameter(bias)  # says only this token
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
        assert answer.shape[1] == 4 + (1 if token in stops else 3)
    assert model.config.eos_token_id == (stops if len(stops) > 1 else stops[0])


def test_what_cannot_work_is_refused(transformers, plain):
    model = load(transformers, plain.folder)
    ids = tokens(2, 5)
    for message, settings in {
        r"it must be \(batch, 5\)": {"attention_mask": torch.ones(2, 4)},
        r"exit_at_step=3 must be in 0 \.\.\. 2": {"exit_at_step": 3},
        r"exit_threshold=1\.5": {"exit_threshold": 1.5},
        "either exit_at_step or exit_threshold": {"exit_threshold": 0.5, "exit_at_step": 1},
    }.items():
        with pytest.raises(ValueError, match=message):
            model(ids, **settings)
    with pytest.raises(ValueError, match="exit_treshold"):
        model.generate(ids, max_new_tokens=2, exit_treshold=0.5)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(ids[:1], max_new_tokens=2, assistant_model=load(transformers, plain.folder))
    cache = model(ids).past_key_values
    model.config.total_ut_steps = 4
    with pytest.raises(ValueError, match="start with a new cache"):
        model(ids[:, :1], past_key_values=cache)
    configuration = type(model.config)
    for wrong in (
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"layer_types": ["sliding_attention"] * 24},
        {"use_sliding_window": True},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("_parameters")):
            configuration(**wrong)
