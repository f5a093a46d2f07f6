"""A saved model in Python: the same numbers as the decoder, the engine and the harness give."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import titan_loop
from tests.inference.conftest import byte_level_tokenizer
from tests.inference.reference import CONTEXT
from tests.readme import run_example
from titan_loop.checkpoint.remote import RemoteCheckpoints
from titan_loop.cli import main as cli
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import QExit
from titan_loop.inference.rows import GeneratedToken, Request
from titan_loop.interactive import LoopModel
from titan_loop.objectives.exit_distribution import exit_pmf

TEXT = "def f(x): return x"
PAGE = Path(titan_loop.__file__).parent / "inference" / "LOOK_INSIDE.md"


def ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text).ids


def weights(model: LoopModel) -> dict[str, torch.Tensor]:
    return dict(model.model.state_dict())


def test_runs_checkpoints_and_exported_folders_are_one_model(trained_run, tmp_path):
    model = titan_loop.load(trained_run)
    exported = tmp_path / "exported"
    assert cli.main(["convert", "export", str(trained_run), "--output", str(exported)]) == 0
    want = model.states(TEXT)
    for path in (trained_run / "checkpoints" / "step-5", exported, str(exported)):
        again = titan_loop.load(path)
        assert again.recurrent_steps == model.recurrent_steps == 2
        assert all(
            torch.equal(weights(again)[name], value) for name, value in weights(model).items()
        )
        assert all(map(torch.equal, again.states(TEXT), want))
        assert again.generate(TEXT, max_new_tokens=5) == model.generate(TEXT, max_new_tokens=5)
        assert again.bits_per_byte(TEXT) == model.bits_per_byte(TEXT)
    assert titan_loop.load(exported, context=9).model.config.max_seq_len == 9
    with pytest.raises(UserError, match=r"ema=True has no effect on .*exported, which is no run"):
        titan_loop.load(exported, ema=True)
    (exported / "tokenizer.json").unlink()
    bare = titan_loop.load(exported)
    assert torch.equal(bare.states(want.tokens_BL).logits_RBLV, want.logits_RBLV)
    with pytest.raises(UserError, match=r"exported has no tokenizer.json; give token ids"):
        bare.generate(TEXT)


def test_a_checkpoint_comes_from_the_remote_store_and_stays_its_owners(own_run, tmp_path):
    url = f"file://{tmp_path}/store"
    RemoteCheckpoints(url, stage="", run=own_run).upload(own_run / "checkpoints" / "step-5")
    want = titan_loop.load(own_run).states(TEXT)
    shutil.rmtree(own_run / "checkpoints")
    (own_run / "remote.json").unlink()
    with pytest.raises(UserError, match="has no committed checkpoint"):
        titan_loop.load(own_run)
    assert all(map(torch.equal, titan_loop.load(own_run, remote=url).states(TEXT), want))
    assert not (own_run / "remote.json").exists()


def test_states_are_the_decoders(trained_run):
    model = titan_loop.load(trained_run)
    states = model.states(TEXT, recurrent_steps=3)
    assert states.tokens_BL.tolist() == [ids(TEXT)]
    output = model.model(states.tokens_BL, recurrent_steps=3)
    assert torch.equal(states.hidden_RBLD, torch.stack(output.hidden_RBLD))
    assert torch.equal(states.logits_RBLV[1], model.model.readout(output.hidden_RBLD[1]))
    assert torch.equal(states.exit_pmf_RBL, exit_pmf(torch.stack(output.exit_logit_RBL)))
    assert states.resid_RNBLD.shape == (3, 2, 1, len(ids(TEXT)), 64)
    assert torch.equal(model.model.norm(states.resid_RNBLD[:, -1]), states.hidden_RBLD)
    assert not any(value.requires_grad for value in states)
    assert states.tokens_BL.equal(model.tokens(states.tokens_BL[0]))
    assert all(value.requires_grad for value in model.states(TEXT, gradient=True)[1:])
    assert model.tokens("").tolist() == [[0]]


def test_a_cache_holds_the_sites_that_were_asked_for(trained_run):
    model = titan_loop.load(trained_run)
    states = model.states(TEXT)
    logits_BLV, cache = model.run_with_cache(TEXT)
    assert torch.equal(logits_BLV, states.logits_RBLV[-1])
    assert [*cache] == model.hook_names()
    asked = ["loop.2.blocks.*.hook_resid_post", "hook_embed"]
    _, few = model.run_with_cache(TEXT, asked, gradient=True)
    assert [*few] == ["hook_embed", *(f"loop.2.blocks.{n}.hook_resid_post" for n in range(2))]
    assert torch.equal(few["loop.2.blocks.1.hook_resid_post"], states.resid_RNBLD[1, 1])
    assert all(value.requires_grad for value in few.values())
    with model.hooks([("loop.1.blocks.0.hook_resid_post", lambda x, hook: x * 0)]):
        _, silenced = model.run_with_cache(TEXT, "loop.1.*")
        changed = model.states(TEXT)
    assert not silenced["loop.1.blocks.1.hook_resid_pre"].any()
    assert not torch.equal(changed.logits_RBLV, states.logits_RBLV)
    assert torch.equal(model.states(TEXT).logits_RBLV, states.logits_RBLV)


def test_generation_is_the_engines_and_streams(trained_run):
    model = titan_loop.load(trained_run)
    options = {"exit": "q:0.5", "recurrent_steps": 4, "max_new_tokens": 8}
    done = model.generate(TEXT, **options)
    engine = Engine(model.model, recurrent_steps=4, exit_policy=QExit(0.5))
    request = Request(prompt=ids(TEXT), max_new_tokens=8, stop_tokens=frozenset({0, 2}))
    (want,) = engine.complete([request])
    assert (done.tokens, done.steps) == (want.tokens, want.steps)
    stream = model.generate(TEXT, stream=True, **options)
    first = next(stream)
    assert isinstance(first, GeneratedToken)
    assert first.text + "".join(event.text for event in stream) == done.text
    drawn = [model.generate("", temperature=2.0, seed=seed).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    name = "loop.2.blocks.0.hook_resid_post"
    with model.hooks([(name, lambda state, hook: state.roll(7, -1))]):
        assert model.generate(TEXT, **options).tokens != done.tokens
    assert model.generate(TEXT, **options) == done


@pytest.mark.parametrize("text", [TEXT, TEXT * 3, TEXT * 9, "naïve"])
def test_bits_per_byte_are_the_harness_rolling_ones(trained_run, text):
    harness = pytest.importorskip("titan_loop.evaluation.harness_model")
    from lm_eval.api.instance import Instance

    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    (log_likelihood,) = harness.LoopLM(trained_run, exit="q:0.6").loglikelihood_rolling([request])
    found = titan_loop.load(trained_run).bits_per_byte(text, exit="q:0.6")
    assert found == pytest.approx(-log_likelihood / math.log(2) / len(text.encode()), abs=1e-9)


def test_mistakes_are_one_line(trained_run, tmp_path):
    model = titan_loop.load(trained_run)
    for words, wrong in {
        f"text has 49 tokens, the context is {CONTEXT}": lambda: model.states("a" * 49),
        "text has ids outside the vocabulary of 300": lambda: model.states(torch.tensor([300])),
        "recurrent_steps=0 must be at least 1": lambda: model.bits_per_byte(
            TEXT, recurrent_steps=0
        ),
        "recurrent_steps=-1 must be at least 1": lambda: model.generate(TEXT, recurrent_steps=-1),
        "text is empty": lambda: model.bits_per_byte(""),
        "hook loop.1.x is no site": lambda: model.run_with_cache(TEXT, "loop.1.x"),
        "stage nothing": lambda: titan_loop.load(trained_run, stage="nothing"),
        "is not a folder": lambda: titan_loop.load(tmp_path / "none"),
    }.items():
        with pytest.raises(UserError, match=words):
            wrong()


@pytest.mark.usefixtures("run_of_the_readme")
def test_the_pages_example_runs(capsys):
    names = run_example(PAGE)
    assert names["lens_RL"].shape == (2, len(ids("def f(")))
    # Behind its last layer the first step decides everything.
    other = names["model"].states("def g(")
    assert torch.equal(names["patched"].logits_RBLV[1], other.logits_RBLV[1])
    assert [slope.shape for slope in names["slopes"]] == [(1, 6, 64)] * 2
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_the_package_alone_imports_no_torch():
    said = "import sys, titan_loop; print('torch' in sys.modules, hasattr(titan_loop, 'nothing'))"
    ran = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert ran.stdout == "False False\n"
