"""Settings of released dense models at their limits: rows, added tokens, windows, scaled bases."""

import json
import shutil

import pytest
from gguf import GGUFReader

from tests.families.ouro.hugging_face.conftest import convert
from tests.models.dense_blocks import BLOCKS
from tests.support.llama_runs import VOCABULARY
from titan_loop.cli import main as cli
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


@pytest.mark.parametrize("window", [5, 128])
def test_gguf_has_the_local_base_of_windows_that_no_text_fills(make_run, tmp_path, window):
    block = {**BLOCKS["gemma3"], "attention_scale": 0.25, "windowed_layers": (0, 2)}
    made = make_run(n_layers=4, recurrent_steps=2, **{**block, "window": window})
    file = tmp_path / "model.gguf"
    convert("export", made.run, "--to", "gguf-unrolled", "--output", file, "--no-tokenizer")
    keys = {name: field.contents() for name, field in GGUFReader(file).fields.items()}
    assert keys["gemma3.rope.freq_base_swa"] == 100.0
    assert keys["gemma3.attention.sliding_window"] == window


def test_mlx_gives_the_local_base_to_other_layers_even_in_whole_windows(make_run, tmp_path, caplog):
    block = {**BLOCKS["gemma3"], "window": 128, "windowed_layers": (0, 2, 5)}
    made = make_run(n_layers=12, recurrent_steps=1, **block)
    folder = tmp_path / "out"
    convert("export", made.run, "--to", "llama-unrolled", "--output", folder, "--no-tokenizer")
    assert "MLX knows windows of Gemma 3 in a period alone" in caplog.text


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
    ],
    ids=["scaled", "uncapped", "biased", "narrow", "biased-gemma3", "capped", "windows-alone"],
)
def test_every_difference_in_mlx_is_said(make_run, tmp_path, caplog, block, words):
    made = make_run(recurrent_steps=1, **block)
    folder = tmp_path / "out"
    convert("export", made.run, "--to", "llama-unrolled", "--output", folder, "--no-tokenizer")
    assert f"MLX {words}" in caplog.text
    assert ("no windows for gemma2" in caplog.text) == ("attention_softcap" in block)


PLAIN = {"rope_attention_factor": 1.0}


@pytest.mark.parametrize(
    "block",
    [BLOCKS["qwen2"], {**BLOCKS["qwen3"], **PLAIN}, BLOCKS["olmo2"], {"unrotated_layers": (3,)}],
    ids=["qwen2", "qwen3", "olmo2", "smollm3"],
)
def test_llama_cpp_has_llama3_s_scaling_for_few(make_run, tmp_path, capsys, block):
    run = make_run(n_layers=4, recurrent_steps=1, **{**block, **BLOCKS["llama3"]}).run
    words = ["convert", "export", run, "--to", "gguf-unrolled", "--output", tmp_path / "m.gguf"]
    assert cli.main([*map(str, words), "--no-tokenizer"]) == 2
    assert "model.rope_scaling=llama3: llama.cpp computes" in capsys.readouterr().err


def test_llama_cpp_has_llama3_s_scaling_for_granite(make_run, tmp_path):
    run = make_run(recurrent_steps=1, **{**BLOCKS["granite"], **BLOCKS["llama3"]}).run
    file = tmp_path / "model.gguf"
    convert("export", run, "--to", "gguf-unrolled", "--output", file, "--no-tokenizer")
    assert "rope_freqs.weight" in {each.name for each in GGUFReader(file).tensors}


def test_gguf_has_windows_of_gemma_2_that_no_text_fills(make_run, tmp_path):
    """Without the key, llama.cpp takes 4096."""
    block = {**BLOCKS["gemma2"], "attention_scale": 0.25, "window": 128, "tie_weights": True}
    made = make_run(n_layers=4, recurrent_steps=1, **{**block, "windowed_layers": (0, 2)})
    file = tmp_path / "model.gguf"
    convert("export", made.run, "--to", "gguf-unrolled", "--output", file, "--no-tokenizer")
    assert GGUFReader(file).fields["gemma2.attention.sliding_window"].contents() == 128


def test_gguf_has_the_head_of_a_tied_olmo_2(make_run, tmp_path):
    """llama.cpp loads none without it."""
    made = make_run(recurrent_steps=1, tie_weights=True, **BLOCKS["olmo2"])
    file = tmp_path / "model.gguf"
    convert("export", made.run, "--to", "gguf-unrolled", "--output", file, "--no-tokenizer")
    found = {each.name: each.data for each in GGUFReader(file).tensors}
    assert (found["output.weight"] == found["token_embd.weight"]).all()


@pytest.mark.parametrize("kind", ["qwen2", "olmo2", "phi3"])
def test_llama_cpp_has_heads_of_their_own_width_for_some(make_run, tmp_path, capsys, kind):
    run = make_run(recurrent_steps=1, head_dim=32, **BLOCKS[kind]).run
    words = ["convert", "export", run, "--to", "gguf-unrolled", "--output", tmp_path / "m.gguf"]
    assert cli.main([*map(str, words), "--no-tokenizer"]) == 2
    assert f"model.head_dim=32: llama.cpp computes {kind} otherwise" in capsys.readouterr().err


@pytest.mark.parametrize(
    "block",
    [
        {"logit_softcap": 2.0},
        {**BLOCKS["gemma2"], "attention_scale": 0.3},
        {**BLOCKS["gemma3"], "attention_softcap": 2.0},
    ],
    ids=["logit_softcap", "attention_scale", "attention_softcap"],
)
def test_layers_that_no_dense_model_has_are_refused(make_run, tmp_path, capsys, block):
    """transformers 5 reads Gemma's scale as an integer; Gemma 3's class ignores attention's cap."""
    words = ["convert", "export", make_run(recurrent_steps=1, **block).run, "--output"]
    words += [tmp_path / "out", "--to", "llama-unrolled", "--no-tokenizer"]
    assert cli.main([*map(str, words)]) == 2
    assert "no dense model of transformers has such layers" in capsys.readouterr().err
