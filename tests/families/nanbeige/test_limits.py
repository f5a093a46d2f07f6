"""Settings of released dense models at their limits: rows, added tokens, windows, scaled bases."""

import json
import shutil

import pytest
from gguf import GGUFReader

from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of
from tests.models.dense_blocks import BLOCKS
from tests.support.llama_runs import VOCABULARY
from titan_loop.text.tokenizer import load_tokenizer


def imported(run, tmp_path, tokenizer):
    folder = tmp_path / "folder"
    convert("export", run, "--to", "llama-unrolled", "--output", folder, "--no-tokenizer")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    convert("import", folder, "--output", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("spare", [267, 421], ids=["Qwen3-0.6B", "Qwen2-7B"])
def test_an_embedding_may_be_padded_far_beyond_the_tokenizer(
    make_run, tmp_path, ascii_tokenizer, spare
):
    made = make_run(recurrent_steps=1, vocab_size=VOCABULARY + spare)
    run = imported(made.run, tmp_path, ascii_tokenizer)
    assert (run / "tokenizer.json").read_bytes() == ascii_tokenizer.read_bytes()


def test_an_added_token_without_a_row_is_left_out(make_run, tmp_path, ascii_tokenizer, caplog):
    image = "<image_soft_token>"  # of Gemma 3, in folders of its text models, too
    tokenizer = load_tokenizer(ascii_tokenizer)
    tokenizer.add_special_tokens([image])
    tokenizer.save(str(tmp_path / "gemma.json"))
    assert tokenizer.token_to_id(image) == VOCABULARY
    run = imported(make_run(recurrent_steps=1).run, tmp_path, tmp_path / "gemma.json")
    found = load_tokenizer(run / "tokenizer.json")
    assert found.get_vocab() == load_tokenizer(ascii_tokenizer).get_vocab()
    assert f"without {image}" in caplog.text
    out = tmp_path / "out"
    convert(
        "export", run, "--to", "llama-unrolled", "--output", out, "--eos-token", "<|endoftext|>"
    )
    assert json.loads((out / "config.json").read_text())["vocab_size"] == VOCABULARY


def gguf_of(make_run, tmp_path, **options) -> GGUFReader:
    """Return the file of a model whose every visit is a layer."""
    file = tmp_path / "model.gguf"
    arguments = ("--to", "gguf-unrolled", "--output", file, "--no-tokenizer")
    convert("export", make_run(**options).run, *arguments)
    return GGUFReader(file)


TIED = {"tie_weights": True}


@pytest.mark.parametrize(
    ("kind", "window", "more"), [("gemma3", 5, {}), ("gemma3", 128, {}), ("gemma2", 128, TIED)]
)
def test_gguf_has_windows_that_no_text_fills(make_run, tmp_path, kind, window, more):
    """Without Gemma 2's, llama.cpp takes 4096."""
    block = {**BLOCKS[kind], "attention_scale": 0.25, "windowed_layers": (0, 2), "window": window}
    fields = gguf_of(make_run, tmp_path, n_layers=4, recurrent_steps=2, **block, **more).fields
    assert fields[f"{kind}.attention.sliding_window"].contents() == window
    if kind == "gemma3":
        assert fields["gemma3.rope.freq_base_swa"].contents() == 100.0


LATE = {**BLOCKS["gemma3"], "n_layers": 12, "window": 128, "windowed_layers": (0, 2, 5)}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({**BLOCKS["gemma2"], "rope_scaling": "linear", "rope_factor": 4.0}, "does not scale the"),
        ({**BLOCKS["gemma2"], "logit_softcap": 0.0}, "cannot run a Gemma 2 without both caps"),
        ({"qk_norm": "head", "attention_biases": "qkvo"}, "does not load qwen3 with attention's"),
        ({**BLOCKS["qwen2"], "head_dim": 8}, "does not load qwen2 with heads that are not"),
        ({**BLOCKS["gemma3"], "attention_biases": "qkvo"}, "does not load gemma3_text with atten"),
        ({**BLOCKS["gemma3"], "logit_softcap": 2.0}, "does not cap logits of a Gemma 3"),
        ({"attention_biases": "qkvo", "window": 5, "windowed_layers": (0, 1)}, "does not load smo"),
        (LATE, "knows windows of Gemma 3 in a period alone"),  # even where windows hold the text
    ],
    ids=["scaled", "uncapped", "biased", "narrow", "biased-gemma3", "capped", "windows", "late"],
)
def test_every_difference_in_mlx_is_said(make_run, tmp_path, caplog, block, words):
    made = make_run(recurrent_steps=1, **block)
    folder = tmp_path / "out"
    convert("export", made.run, "--to", "llama-unrolled", "--output", folder, "--no-tokenizer")
    assert f"MLX {words}" in caplog.text
    assert ("no windows for gemma2" in caplog.text) == ("attention_softcap" in block)


def test_gguf_has_llama3_s_scaling_of_granite(make_run, tmp_path):
    options = {**BLOCKS["granite"], **BLOCKS["llama3"]}
    file = gguf_of(make_run, tmp_path, recurrent_steps=1, **options)
    assert "rope_freqs.weight" in {each.name for each in file.tensors}


def test_gguf_has_the_head_of_a_tied_olmo_2(make_run, tmp_path):
    """llama.cpp loads none without it."""
    file = gguf_of(make_run, tmp_path, recurrent_steps=1, tie_weights=True, **BLOCKS["olmo2"])
    found = {each.name: each.data for each in file.tensors}
    assert (found["output.weight"] == found["token_embd.weight"]).all()


QWEN3 = {**BLOCKS["qwen3"], "rope_attention_factor": 1.0}


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        *(
            (
                "gguf-unrolled",
                {"n_layers": 4, **block, **BLOCKS["llama3"]},
                "model.rope_scaling=llama3: llama.cpp computes",
            )
            for block in (BLOCKS["qwen2"], QWEN3, BLOCKS["olmo2"], {"unrotated_layers": (3,)})
        ),
        *(
            (
                "gguf-unrolled",
                {"head_dim": 32, **BLOCKS[kind]},
                f"model.head_dim=32: llama.cpp computes {kind} otherwise",
            )
            for kind in ("qwen2", "olmo2", "phi3")
        ),
        *(
            ("llama-unrolled", block, "no dense model of transformers has such layers")
            for block in (
                {"logit_softcap": 2.0},
                # transformers 5 reads Gemma's scale as an integer; Gemma 3 ignores attention's cap.
                {**BLOCKS["gemma2"], "attention_scale": 0.3},
                {**BLOCKS["gemma3"], "attention_softcap": 2.0},
            )
        ),
    ],
)
def test_layers_that_an_engine_lacks_are_refused(make_run, tmp_path, capsys, to, options, message):
    run = make_run(recurrent_steps=1, **options).run
    flags = ("--to", to, "--output", tmp_path / "out", "--no-tokenizer")
    assert message in error_of(capsys, "export", run, *flags)
