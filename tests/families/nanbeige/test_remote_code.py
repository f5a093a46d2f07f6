"""The Nanbeige folder's own code in transformers: logits, caches, attention functions."""

import json
from pathlib import Path

import pytest
import torch

from tests.contracts.folders import opened
from tests.families.nanbeige.conftest import VOCABULARY
from tests.families.nanbeige.test_formats import convert

CLOSE = 1e-5
TASK = "multi_hop"
# 48, as torch 2.13's FlexAttention on a CPU without AVX-512 is wrong at lengths of 8 modulo 32.
TOKENS = torch.arange(48)[None] * 7 % VOCABULARY


def ours(model, tokens=TOKENS, **settings):
    with torch.no_grad():
        return model.readout(model(tokens, **settings).hidden_RBLD[-1])


def begin_with(bos: str, tokenizer: Path) -> None:
    """Have a `tokenizer.json` put a token in front of every text."""
    record = json.loads(tokenizer.read_text())
    (number,) = (each["id"] for each in record["added_tokens"] if each["content"] == bos)
    record["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }
    tokenizer.write_text(json.dumps(record))


def alone(engine, text: str) -> float:
    """Return the log-likelihood of a text after one BOS, by the harness' model of transformers."""
    text_ids = engine.tok_encode(text, add_special_tokens=False)
    ids = torch.tensor([[engine.prefix_token_id, *text_ids]])
    nats = engine.model(ids).logits[0, :-1].log_softmax(-1)
    return nats.gather(1, ids[0, 1:, None]).sum().item()


@pytest.mark.hf5  # with version 4 the harness' model for transformers is not tried
@pytest.mark.parametrize("has_bos", [True, False], ids=["bos", "plain"])
@pytest.mark.parametrize("to", ["llama-unrolled", "nanbeige"])
@torch.no_grad()
def test_the_harness_finds_the_same_answers_in_two_engines(
    make_run, tmp_path, ascii_tokenizer, monkeypatch, to, has_bos
):
    """Each engine at batches of 1 and 8: four answers to every question."""
    pytest.importorskip("transformers", reason="see tools/test_hf.sh")
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from titan_loop.evaluation.harness_model import LoopLM
    from titan_loop.evaluation.offline_tasks import offline_config

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # a third of the time
    folder, run = tmp_path / "model", tmp_path / "run"
    flags = ("--to", to, "--output", folder, "--tokenizer", ascii_tokenizer)
    convert("export", make_run(recurrent_steps=2).run, *flags)
    if has_bos:
        begin_with("<|endoftext|>", folder / "tokenizer.json")
    convert("import", folder, "--output", run)
    models = [
        model
        for batch in (1, 8)
        for window in [{"max_length": 1024, "batch_size": batch}]
        for model in (
            LoopLM(checkpoint=str(run), **window),
            HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu", **window),
        )
    ]
    answers = [
        simple_evaluate(
            model=model,
            tasks=[offline_config(TASK)],
            task_manager=TaskManager(include_defaults=False),
            limit=40,
            log_samples=True,
        )
        for model in models
    ]
    nats = [
        torch.tensor(
            [[each for each, _ in one["filtered_resps"]] for one in found["samples"][TASK]]
        )
        for found in answers
    ]
    accuracies = [found["results"][TASK]["acc,none"] for found in answers]
    texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("Hello, you.", "def f")]
    rolling = [torch.tensor(model.loglikelihood_rolling(texts)) for model in models]
    if has_bos:  # theirs scores BOS after BOS, and the text after both
        rolling[1::2] = [
            torch.tensor([alone(model, text.args[0]) for text in texts]) for model in models[1::2]
        ]
    assert len(nats[0]) == 40
    for found in (nats, rolling):
        torch.testing.assert_close(
            torch.stack(found), found[0].expand(4, *found[0].shape), atol=1e-4, rtol=0
        )
    assert accuracies == accuracies[:1] * 4


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_a_folder_that_transformers_wrote_is_imported(transformers, tmp_path, kind):
    window = {"sliding_window": None} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        **window,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "llama")
    convert("import", tmp_path / "llama", "--output", tmp_path / "run")
    model = opened(tmp_path / "run")
    with torch.no_grad():
        want = theirs(TOKENS).logits
    torch.testing.assert_close(ours(model), want, atol=CLOSE, rtol=0)
    out = tmp_path / "out"
    convert("export", tmp_path / "run", "--to", "llama-unrolled", "--output", out, "--no-tokenizer")
    again = transformers.LlamaForCausalLM.from_pretrained(out).state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again[name], tensor), name
