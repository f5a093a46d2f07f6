"""Runs of HRM-Text: examined, averaged, exported; prefixes of prompts."""

from pathlib import Path

import pytest
import torch

from tests.contracts.runs import whole_run
from tests.families.hrm_text.contract import run
from tests.inference.reference import prompts
from tests.support.tiny import train_run
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.runs.run_directory import RunDirectory


@pytest.mark.usefixtures("alone")
def test_a_run_is_examined_averaged_and_exported(tmp_path_factory, tmp_path: Path, capfd):
    whole = whole_run("hrm_text/prefixes", tmp_path_factory)
    assert RunDirectory(whole).evals_jsonl.exists()
    assert main(["eval", str(whole), "--tasks", "mano", "--depths", "1", "2", "--limit", "8"]) == 0
    assert "mano" in capfd.readouterr().out
    files = []
    for flags in ((), ("--ema",)):
        out = tmp_path / f"out{len(flags)}"
        words = ["convert", "export", str(whole), "--output", str(out), "--to", "hrm_text"]
        assert main([*words, "--no-tokenizer", *flags]) == 0
        files.append((out / "model.safetensors").read_bytes())
    assert "vLLM 0.32 reads" in (out / "README.md").read_text()
    assert len(files[0]) == len(files[1])
    assert files[0] != files[1]


@torch.no_grad()
@pytest.mark.parametrize("of_chats", [False, True])
def test_prompts_of_other_lengths_have_prefixes_of_their_own(make_run, of_chats):
    model = make_run(n_layers=2, low_cycles=2).model.double()
    prefixes = (4, 1, 6) if of_chats else (None,) * 3
    requests = [
        Request(prompt=prompt, max_new_tokens=6, prefix_tokens=prefix)
        for prompt, prefix in zip(prompts(9, 2, 6), prefixes, strict=True)
    ]
    together = Engine(model).complete(requests)
    for request, completion in zip(requests, together, strict=True):
        ids = [*request.prompt, *completion.tokens]
        prefix = torch.arange(len(ids))[None] < (request.prefix_tokens or len(request.prompt))
        states = model(torch.tensor([ids]), columns={"prefix": prefix}).hidden_RBLD
        said = model.readout(states[-1])[0, len(request.prompt) - 1 : -1].argmax(-1).tolist()
        assert said == completion.tokens


@pytest.mark.usefixtures("alone")
def test_prefixes_for_a_model_without_them_are_refused(tmp_path: Path, capfd):
    words = ["train", "hrm_small", "--stage", "hrm_mano", "--dump-folder", str(tmp_path)]
    assert main([*words, "--model.no-prefix-lm"]) == 2
    assert "dataloader.prefix=True has no effect on model.family=hrm_text" in capfd.readouterr().err
    config = run(tmp_path / "run", 1)
    config.dataloader.prefix = False  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="the model reads prefix, and dataloader=TaskLoader"):
        train_run(config)
