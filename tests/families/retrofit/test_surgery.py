"""A dense model becomes a loop: what it keeps, what it records, and what is refused."""

import pytest
import torch

from tests.families.ouro.hugging_face.conftest import convert
from tests.families.retrofit.conftest import TOKENS, Made, Retrofit, logits
from tests.models.dense_blocks import BLOCKS
from tests.support.command_lines import refused
from titan_loop.runs.saved_run import SavedRun


@pytest.mark.parametrize("mode", ["identity", "plain"])
def test_one_step_is_the_dense_model_bit_by_bit(dense: Made, retrofit: Retrofit, mode: str):
    assert torch.equal(logits(retrofit(mode).model, 1), logits(dense.model, 1))


def test_untrained_every_number_of_steps_is_the_bare_loop(retrofit: Retrofit):
    plain, identity = retrofit("plain").model, retrofit("identity").model
    for steps in (2, 3):
        assert torch.equal(logits(identity, steps), logits(plain, steps))


def test_one_damped_step_is_the_dense_model_and_more_are_parts_of_it(dense, retrofit):
    whole = retrofit("damped", "--recurrent-steps", 1).model
    assert torch.equal(logits(whole, 1), logits(dense.model, 1))
    model, layers = retrofit("damped", "--recurrent-steps", 3).model, dense.model.layers
    context = dense.model.make_context(TOKENS)
    with torch.no_grad():
        state = layers["0"](dense.model.tok_embeddings(TOKENS), context)
        for _ in range(3):
            state = state + (layers["2"](layers["1"](state, context), context) - state) / 3
        want = dense.model.readout(dense.model.norm(layers["3"](state, context)))
    torch.testing.assert_close(logits(model, 3), want, atol=1e-4, rtol=0)


def test_the_bridge_reads_the_prelude_from_the_second_step_on(retrofit: Retrofit):
    model = retrofit("identity").model
    before = [logits(model, steps) for steps in (1, 2)]
    with torch.no_grad():
        model.bridge.weight.normal_(std=0.1)  # type: ignore[union-attr]
        model.bridge.norm.weight.fill_(2.0)  # type: ignore[union-attr]
    assert torch.equal(logits(model, 1), before[0])
    context = model.make_context(TOKENS)
    with torch.no_grad():
        prelude = model.layers["0"](model.tok_embeddings(TOKENS), context)
        state = model.layers["2"](model.layers["1"](prelude, context), context)
        normed = prelude * (prelude.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        state = state + 2.0 * normed @ model.bridge.weight.T  # type: ignore[union-attr]
        state = model.layers["2"](model.layers["1"](state, context), context)
        want = model.readout(model.norm(model.layers["3"](state, context)))
    assert not torch.equal(logits(model, 2), before[1])
    torch.testing.assert_close(logits(model, 2), want, atol=1e-4, rtol=0)


def test_a_folder_is_as_good_as_a_run(dense: Made, retrofit: Retrofit, ascii_tokenizer, tmp_path):
    folder = tmp_path / "llama"
    flags = ("--to", "llama-unrolled", "--tokenizer", ascii_tokenizer)
    convert("export", dense.run, "--output", folder, *flags)
    looped = retrofit("identity", source=folder)
    assert torch.equal(logits(looped.model, 1), logits(dense.model, 1))
    lineage = SavedRun.open(looped.run).checkpoint().manifest["lineage"]
    assert lineage["imported_from"] == str(folder)
    assert (looped.run / "tokenizer.json").read_bytes() == ascii_tokenizer.read_bytes()


SPANS = ("--prelude", 1, "--core", 2, "--coda", 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prelude", 2, "--core", 2, "--coda", 1), "are 5 layers, and the model has 4"),
        (("--prelude", 2, "--core", 0, "--coda", 2), "--core=0 must be at least 1"),
        (("--prelude", 1, "--core", 2), "--coda is missing; --scan recommends layers"),
        (
            (*SPANS, "--noise", 0.5),
            "--noise=0.5 has no effect with --mode=identity, only with dro",
        ),
        ((*SPANS, "--rank", 65), "--rank=65 is above the model's width, 64"),
    ],
)
def test_spans_that_do_not_fit_are_one_line(dense: Made, capsys, tmp_path, flags, message):
    run = ("retrofit", dense.run, "--output", tmp_path / "run")
    assert message in refused(capsys, *run, *flags)
    assert not [*tmp_path.iterdir()]


WINDOWED = {"n_layers": 4, "recurrent_steps": 1, "window": 4, "windowed_layers": (0, 1)}


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        (
            {"recurrent_steps": 2},
            "plain",
            "runs 2 recurrent steps; retrofit starts from a dense m",
        ),
        (
            {"recurrent_steps": 1, "exit_gate": True},
            "plain",
            "has model.exit_gate=True; retrofit s",
        ),
        (
            WINDOWED,
            "tied",
            "layers=(0, 1): --mode=tied would make one layer of [0, 2], which",
        ),
    ],
)
def test_other_models_are_not_retrofitted(make_run, capsys, tmp_path, options, mode, message):
    run = ("retrofit", make_run(**options).run, "--output", tmp_path / "run")
    flags = ("--prelude", 0, "--core", 2, "--coda", 0, "--mode", mode)
    assert message in refused(capsys, *run, *flags)


def test_dropped_leaves_the_middle_out_and_mixes_state_and_prelude(dense: Made, retrofit: Retrofit):
    spans = ("--prelude", 1, "--core", 1, "--coda", 1)
    model, layers = retrofit("dropped", *spans).model, dense.model.layers
    context = dense.model.make_context(TOKENS)

    def want(mix) -> torch.Tensor:
        prelude = layers["0"](dense.model.tok_embeddings(TOKENS), context)
        state = prelude
        for _ in range(2):
            state = layers["2"](mix(state, prelude), context)
        return dense.model.readout(dense.model.norm(layers["3"](state, context)))

    with torch.no_grad():
        kept = want(lambda state, prelude: state)
        torch.testing.assert_close(logits(model, 2), kept, atol=1e-4, rtol=0)
        left, right = torch.randn(2, 64, 64).mul(0.1).unbind()
        model.mixer.weight.copy_(torch.cat((left, right), 1))  # type: ignore[union-attr]
        mixed = want(lambda state, prelude: state @ left.T + prelude @ right.T)
    torch.testing.assert_close(logits(model, 2), mixed, atol=1e-4, rtol=0)


def test_dropped_may_start_from_noise(dense: Made, retrofit: Retrofit):
    spans = ("--prelude", 1, "--core", 1, "--coda", 1)
    prelude, noisy = (retrofit("dropped", *spans, "--noise", s).model for s in (0, 0.5))
    # The first step reads the prelude alone in either form, whatever is drawn.
    assert torch.equal(logits(noisy, 1), logits(prelude, 1))
    with torch.no_grad():
        noisy.mixer.weight[:, :64].copy_(torch.eye(64))  # type: ignore[index, union-attr]
    before = logits(noisy, 1)
    noisy.train()
    torch.manual_seed(1)
    drawn = logits(noisy, 1)
    torch.manual_seed(1)
    assert torch.equal(logits(noisy, 1), drawn)
    assert not torch.allclose(drawn, before)
    tokens = TOKENS.repeat(50, 1)
    state = noisy.start(tokens, noisy.make_context(tokens)).hidden_BLD
    assert float(state.std()) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_dense_block_loops_in_every_mode(make_run, retrofit: Retrofit, name: str):
    alternating = {"windowed_layers": (0, 2), "unrotated_layers": (1, 3)}
    block = {key: alternating.get(key, value) for key, value in BLOCKS[name].items()}
    dense = make_run(n_layers=4, recurrent_steps=1, **block)
    for mode, layers, rest in (
        ("identity", (1, 2, 1), ()),
        ("dropped", (1, 1, 1), ()),
        ("tied", (0, 2, 0), ("--rank", "4")),
    ):
        if mode == "dropped" and "windowed_layers" not in block:
            continue  # equal layers are dropped alike
        spans = zip(SPANS[::2], layers, strict=True)
        flags = [word for span in spans for word in span]
        model = retrofit(mode, *flags, *rest, source=dense.run).model
        assert torch.isfinite(logits(model, 2)).all()
        if mode == "identity":
            assert torch.equal(logits(model, 1), logits(dense.model, 1))
        window = dense.model.config.window
        windows = [layer.attention.window for layer in model.config.layers]
        if name in ("gemma2", "gemma3"):
            kinds = {"dropped": [window, window, None], "tied": [window, None]}
            assert windows == kinds.get(mode, [window, None] * 2)
        else:
            assert {*windows} == {window}
