"""A checkpoint on disk becomes the model that was saved, or one line says why not."""

import json
from pathlib import Path

import pytest
import torch

from tests.inference.conftest import byte_level_tokenizer
from tests.inference.reference import CONTEXT, prompts
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.inference.rows import Request
from titan_loop.runs.run_directory import RunDirectory


def set_mixture(run: Path, mixture: list[str]) -> None:
    """Have a run's config name other sources."""
    config = RunDirectory(run).read_config()
    config["dataloader"]["mixture"] = mixture
    RunDirectory(run).config_json.write_text(json.dumps(config))


def test_run_and_checkpoint_give_the_saved_weights(trained_run, weights):
    for path in (trained_run, trained_run / "checkpoints" / "step-5"):
        loaded = load_checkpoint(path)
        assert loaded.checkpoint == trained_run / "checkpoints" / "step-5"
        assert loaded.recurrent_steps == 2
        state = loaded.model.state_dict()
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], weights[name]) for name in weights)
        assert not loaded.model.training
        assert loaded.model.config.max_seq_len == CONTEXT


def test_a_context_beyond_the_trained_window_is_said(trained_run, caplog):
    load_checkpoint(trained_run, context_tokens=CONTEXT + 1)
    assert not caplog.messages
    load_checkpoint(trained_run, context_tokens=CONTEXT + 2)
    assert "longer than the trained window of 48" in caplog.text


def test_gate_and_rotations_stay_wide_in_half_precision(trained_run):
    loaded = load_checkpoint(trained_run, dtype=torch.bfloat16, context_tokens=16)
    dtypes = {name: value.dtype for name, value in loaded.model.named_parameters()}
    assert {dtypes.pop(name) for name in [*dtypes] if "exit_gate" in name} == {torch.float32}
    assert {*dtypes.values()} == {torch.bfloat16}
    assert loaded.model.positions.table.cache.dtype == torch.float32
    assert loaded.model.config.max_seq_len == 16
    engine = Engine(loaded.model, recurrent_steps=4, kv_cache="averaged")
    assert len(engine.complete([Request(prompt=prompts(4)[0], max_new_tokens=5)])[0].tokens) == 5


def test_the_tokenizer_comes_from_the_source(trained_run):
    loaded = load_checkpoint(trained_run)
    text = "naïve 漢 <|im_end|>"
    tokenizer = load_matching_tokenizer(loaded)
    assert tokenizer.encode(text).ids == byte_level_tokenizer().encode(text).ids
    same = loaded.run.sources[0] / "tokenizer.json"
    assert load_matching_tokenizer(loaded, same).get_vocab() == tokenizer.get_vocab()


def test_texts_end_where_the_training_data_said(trained_run, ended_run):
    def ends(run):
        loaded = load_checkpoint(run)
        return text_ends(loaded, load_matching_tokenizer(loaded))

    assert ends(trained_run) == (0, 2, None, frozenset())
    assert ends(ended_run.path) == (ended_run.end, 2, None, frozenset())
    assert ends(ended_run.path).stop_tokens == {ended_run.end, 2}


@pytest.mark.parametrize(
    ("recorded", "ends"),
    [
        ({"text": {"end_of_text": "a", "turn_end": "b"}}, ("a", "b", None)),
        ({"text": {"end_of_text": "a", "begin_of_text": "c"}}, ("a", "<|im_end|>", "c")),
        ({"text": None}, ("<|endoftext|>", "<|im_end|>", None)),
        ({}, ("<|endoftext|>", "<|im_end|>", None)),
        ({"text": {"end_of_text": "a", "end_tokens": ["b", "c"]}}, ("a", "<|im_end|>", None)),
    ],
)
def test_an_imported_run_has_recorded_where_texts_end(own_run, recorded, ends):
    config = RunDirectory(own_run).read_config()
    config["dataloader"]["mixture"] = []
    (own_run / "config.json").write_text(json.dumps(config | recorded))
    tokenizer = byte_level_tokenizer()
    ids = tuple(None if token is None else tokenizer.token_to_id(token) for token in ends)
    found = text_ends(load_checkpoint(own_run), tokenizer)
    assert found[:3] == ids
    others = (recorded.get("text") or {}).get("end_tokens", ())
    assert found.others == {tokenizer.token_to_id(token) for token in others}
    assert found.stop_tokens == {*ids[:2], *found.others}


def refusal(call) -> str:
    with pytest.raises(UserError) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_is_no_checkpoint_is_refused(own_run, tmp_path):
    assert "is not a folder" in refusal(lambda: load_checkpoint(tmp_path / "nowhere"))
    assert "has no manifest.json" in refusal(lambda: load_checkpoint(tmp_path))
    checkpoint = own_run / "checkpoints" / "step-5"
    (checkpoint / "manifest.json").rename(tmp_path / "manifest.json")
    assert "has no manifest.json" in refusal(lambda: load_checkpoint(checkpoint))
    assert "has no committed checkpoint" in refusal(lambda: load_checkpoint(own_run))


def test_another_tokenizer_is_refused(trained_run, tmp_path):
    loaded = load_checkpoint(trained_run)
    larger = byte_level_tokenizer()
    larger.add_tokens([f"word{i}" for i in range(60)])
    larger.save(str(tmp_path / "larger.json"))
    message = refusal(lambda: load_matching_tokenizer(loaded, tmp_path / "larger.json"))
    assert "is not the one" in message
    message = refusal(lambda: load_matching_tokenizer(loaded, tmp_path / "none.json"))
    assert "is not a file" in message


def test_without_a_source_the_tokenizer_must_be_given(own_run, tmp_path):
    set_mixture(own_run, ["gone=1"])
    loaded = load_checkpoint(own_run)
    assert "with --tokenizer" in refusal(lambda: load_matching_tokenizer(loaded))
    byte_level_tokenizer().save(str(tmp_path / "same.json"))
    assert load_matching_tokenizer(loaded, tmp_path / "same.json").get_vocab_size() == 259
    larger = byte_level_tokenizer()
    larger.add_tokens([f"word{i}" for i in range(60)])
    larger.save(str(tmp_path / "larger.json"))
    message = refusal(lambda: load_matching_tokenizer(loaded, tmp_path / "larger.json"))
    assert "has 319 token ids, the model's vocabulary has 300" in message
