"""lm-evaluation-harness on exported folders: its model of transformers beside ours."""

import json
from pathlib import Path

import pytest
import torch

from tests.contracts.folders import OWN_CODE, write_folder
from tests.families.ouro.hugging_face.conftest import convert

TASK = "multi_hop"


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
@pytest.mark.parametrize("to", ["llama-unrolled", *OWN_CODE])
@torch.no_grad()
def test_the_harness_finds_the_same_answers_in_two_engines(
    tmp_path, tokenizer_file, monkeypatch, to, has_bos
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
    folder, run = write_folder(tmp_path, to, tokenizer_file).folder, tmp_path / "again"
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
