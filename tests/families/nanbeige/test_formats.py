"""Folders of Llama and Nanbeige, in and out, and GGUF files as the `gguf` package reads them."""

import json
import re

import gguf
import numpy as np
import pytest
import torch

from tests.contracts.folders import opened
from tests.data.shapes.tokenizers import sentencepiece
from tests.families.ouro.hugging_face.conftest import convert, convert_killed
from tests.families.ouro.hugging_face.test_export import error_of
from tests.support.llama_runs import UNSPLIT, VOCABULARY, maker
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.formats import gguf_file, llama_cpp
from titan_loop.formats.gguf_file import neighbours
from titan_loop.formats.gguf_tokenizer import tokenizer_problem
from titan_loop.formats.stress_texts import stress_texts

_PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
PLAIN = _PREFIXED | {"add_prefix_space": False}


def split(*patterns, behavior="Isolated", invert=False):
    """Return a pre-tokenizer that splits by patterns."""
    same = {"type": "Split", "behavior": behavior, "invert": invert}
    bytes_ = _PREFIXED | {"add_prefix_space": False, "use_regex": False}
    steps = [*({**same, "pattern": {"Regex": pattern}} for pattern in patterns), bytes_]
    return {"type": "Sequence", "pretokenizers": steps}


# As their own tokenizers write them.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace("{1,3}", "")
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}


@pytest.mark.parametrize("steps", [1, 3])
def test_every_visit_is_a_layer_of_the_unrolled_model(make_run, tmp_path, ascii_tokenizer, steps):
    made = make_run(**SPLIT)
    out, back = tmp_path / "out", tmp_path / "back"
    flags = ("--tokenizer", ascii_tokenizer, "--recurrent-steps", steps)
    convert("export", made.run, "--to", "llama-unrolled", "--output", out, *flags)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 2 + 2 * steps
    convert("import", out, "--output", back)
    dense = opened(back)
    assert dense.recurrent_steps == 1
    assert len(dense.layers) == 2 + 2 * steps
    tokens = torch.arange(40)[None] * 7 % VOCABULARY
    want = made.model(tokens, recurrent_steps=steps).hidden_RBLD[-1]
    assert torch.equal(dense(tokens).hidden_RBLD[-1], want)


def listed(capsys, run, *flags):
    convert("export", run, "--list", *flags)
    return dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())


def test_the_list_says_what_llama_cpp_has(
    make_run, tmp_path, tmp_path_factory, capsys, ascii_tokenizer
):
    run = make_run().run
    for format_ in ("gguf", "gguf-unrolled"):
        assert listed(capsys, run, "--recurrent-steps", 256)[format_].startswith("yes")
        assert listed(capsys, run, "--recurrent-steps", 257)[format_].startswith("no: llama.cpp")
    other = changed(ascii_tokenizer, tmp_path / "tokenizer.json", {"merges": []})
    for format_ in ("gguf", "gguf-unrolled"):
        answer = listed(capsys, run, "--tokenizer", other)[format_]
        assert "; but its tokenizer has no merges, and llama.cpp loads" in answer
        assert "tokenizer" not in listed(capsys, run, "--tokenizer", ascii_tokenizer)[format_]
    ouro = maker(OuroOptions, tmp_path_factory)().run
    assert "no released llama.cpp loads it" in listed(capsys, ouro)["gguf"]


@pytest.mark.parametrize(
    ("to", "options", "flags", "message"),
    [
        ("gguf", {"exit_gate": True}, (), "model.exit_gate=True: the Nanbeige format has no place"),
        (
            "gguf",
            {},
            ("--recurrent-steps", 257),
            "at most 512 layers, and this model has 514 with every recurrent step counted",
        ),
        ("gguf", {"vocab_size": 290}, (), "has 300 token ids"),
        ("gguf", {}, ("--dtype", "q4_0"), "--dtype=q4_0 needs llama.cpp's wheel: pip install"),
        ("gguf", {}, ("--measure", "."), "--measure needs llama.cpp's wheel: pip install"),
        ("nanbeige", {}, ("--measure", "."), "--to=nanbeige is no GGUF"),
        ("gguf", {}, ("--measure-steps", 2), "no effect without --measure SOURCE"),
    ],
)
def test_models_that_a_format_cannot_hold_are_one_line(
    make_run, tmp_path, capsys, ascii_tokenizer, monkeypatch, to, options, flags, message
):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    made = make_run(**options)
    arguments = (made.run, "--to", to, "--output", tmp_path / "out")
    assert message in error_of(capsys, "export", *arguments, "--tokenizer", ascii_tokenizer, *flags)
    assert not [*tmp_path.glob("*")]


def test_a_killed_export_has_no_file_of_that_name(make_run, tmp_path):
    output = tmp_path / "model.gguf"
    arguments = ("export", make_run().run, "--to", "gguf", "--no-tokenizer", "--output", output)
    convert_killed(gguf_file.neighbours, gguf_file, *arguments)
    (left,) = tmp_path.iterdir()
    assert left.name == ".model.gguf.unfinished"
    convert(*arguments)  # the next attempt clears it away
    assert [*tmp_path.iterdir()] == [output]


def changed(tokenizer, path, change):
    """Write a tokenizer.json with other parts, or other parts of its model."""
    record = json.loads(tokenizer.read_text())
    record["model"].setdefault("ignore_merges", False)
    for name, value in change.items():
        (record["model"] if name in record["model"] else record)[name] = value
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "NFKC"}}, "has the normalizer NFKC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits text by Whitespace, and llama"),
        ({"pre_tokenizer": split(O200K)}, "text as none of llama.cpp's pre-tokenizers"),
        ({"pre_tokenizer": split(r"\p{L}+|\p{N}{2}")}, "; --approximate-tokenizer writes it; "),
        ({"merges": []}, "has no merges, and llama.cpp loads no byte-level BPE without one"),
        ({"byte_fallback": True}, "is a SentencePiece BPE with another normalizer or pre-token"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks(
    make_run, tmp_path, capsys, ascii_tokenizer, change, message
):
    other = changed(ascii_tokenizer, tmp_path / "tokenizer.json", change)
    arguments = ("export", make_run().run, "--to", "gguf", "--output", tmp_path / "a.gguf")
    error = error_of(capsys, *arguments, "--tokenizer", other)
    assert message in error
    assert "write a folder instead" in error
    assert [*tmp_path.iterdir()] == [other]


IGNORING = {"ignore_merges": True}


def written(make_run, folder, tokenizer, *flags):
    """Return llama.cpp's name of the pre-tokenizer in the exported file."""
    path = folder / "a.gguf"
    arguments = ("--to", "gguf", "--output", path, "--tokenizer", tokenizer)
    convert("export", make_run(vocab_size=UNSPLIT).run, *arguments, *flags)
    assert value(path, "tokenizer.ggml.add_bos_token") is False
    return value(path, "tokenizer.ggml.pre")


def value(path, key):
    """Return the value of a key of a GGUF file."""
    field = gguf.GGUFReader(path).get_field(key)
    assert field is not None, key
    return field.contents()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"pre_tokenizer": split(CL100K)}, "dbrx"),
        ({"pre_tokenizer": split(CL100K), **IGNORING}, "llama-bpe"),
        ({"pre_tokenizer": split(QWEN2, behavior="Removed", invert=True)}, "qwen2"),
        ({"pre_tokenizer": split(QWEN2), **IGNORING}, "qwen2"),  # merges make every token
        ({"pre_tokenizer": split(BAILING)}, "qwen2"),
        ({"pre_tokenizer": split(*DEEPSEEK_V3)}, "deepseek-v3"),
        ({"pre_tokenizer": PLAIN, "normalizer": {"type": "Sequence", "normalizers": []}}, "gpt-2"),
    ],
)
def test_a_tokenizer_is_known_by_how_it_splits(
    make_run, tmp_path, unsplit_tokenizer, caplog, change, name
):
    other = changed(unsplit_tokenizer, tmp_path / "tokenizer.json", change)
    assert written(make_run, tmp_path, other) == name
    assert "other ids" not in caplog.text


@pytest.mark.parametrize(
    ("ignores", "pattern", "problem"),
    [
        (True, CL100K, None),
        (True, QWEN2, "has ignore_merges=True, and llama.cpp's qwen2 is the other way"),
        (False, QWEN2, None),
    ],
)
def test_a_token_that_no_merge_makes(unsplit_tokenizer, tmp_path, ignores, pattern, problem):
    record = json.loads(unsplit_tokenizer.read_text())
    vocabulary = {**record["model"]["vocab"], "QZQZQ": UNSPLIT}
    change = {"pre_tokenizer": split(pattern), "ignore_merges": ignores, "vocab": vocabulary}
    other = changed(unsplit_tokenizer, tmp_path / "tokenizer.json", change)
    assert tokenizer_problem(other) == problem


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"pre_tokenizer": split(O200K)}, "granite-embed-multi-97m", "splits other words"),
        ({"normalizer": {"type": "NFC"}, "pre_tokenizer": PLAIN}, "gpt-2", "its normalizer NFC is"),
    ],
)
def test_texts_that_get_other_ids_are_counted(
    make_run, tmp_path, unsplit_tokenizer, caplog, change, name, reason
):
    other = changed(unsplit_tokenizer, tmp_path / "tokenizer.json", change)
    flags = ("--approximate-tokenizer",) if "words" in reason else ()
    assert written(make_run, tmp_path, other, *flags) == name
    (warning,) = [record.message for record in caplog.records if "other ids" in record.message]
    assert reason in warning
    (count,) = re.findall(r": (\d+) of the \d+ built-in texts get other ids", warning)
    assert 10 < int(count) < len(stress_texts()) / 4


TOGETHER = [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]]
APART = [["a", "b"], ["b", "c"], ["a", "bc"], ["▁", "t"], ["ab", "c"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"merges": TOGETHER}, "never merges '▁' and 't', which llama.cpp would join"),
        ({"merges": APART}, "has merges into 'abc' at several places of its list"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "another normalizer or pre-tokenizer than"),
    ],
)
def test_sentencepiece(make_run, tmp_path, capsys, change, message):
    path = tmp_path / "tokenizer.json"
    made = json.loads(sentencepiece().to_str())
    made["model"]["vocab"] |= {"ab": 285, "bc": 286, "abc": 287}
    made["model"]["merges"] += TOGETHER
    path.write_text(json.dumps(made))
    changed(path, path, change)
    output = tmp_path / "a.gguf"
    arguments = ("export", make_run().run, "--to", "gguf", "--output", output, "--tokenizer", path)
    if message is not None:
        assert message in error_of(capsys, *arguments)
        return
    convert(*arguments)
    assert value(output, "tokenizer.ggml.model") == "llama"
    assert value(output, "tokenizer.ggml.add_space_prefix") is True
    scores = value(output, "tokenizer.ggml.scores")
    assert [scores[number] for number in (284, 285, 286, 287, 5)] == [-1, -2, -3, -4, -6]


def test_weights_of_every_loop_s_loss_change_no_model(make_run, tmp_path):
    out = tmp_path / "out"
    run = make_run(recurrent_steps=4).run
    convert("export", run, "--to", "nanbeige", "--output", out, "--no-tokenizer")
    config = json.loads((out / "config.json").read_text()) | {"loop_loss_weights": [0.1, 0.2, 0.3]}
    (out / "config.json").write_text(json.dumps(config))
    convert("import", out, "--output", tmp_path / "run")


def test_a_gguf_file_has_every_tensor_and_key(make_run, tmp_path, ascii_tokenizer):
    made = make_run(norm_placement="every_step", recurrent_steps=2)
    path = tmp_path / "model.gguf"
    convert("export", made.run, "--to", "gguf", "--output", path, "--tokenizer", ascii_tokenizer)
    reader = gguf.GGUFReader(path)
    keys = {
        "general.architecture": "nanbeige",
        "nanbeige.num_loops": 2,
        "nanbeige.skip_loop_final_norm": False,
        "nanbeige.block_count": 2,
        "nanbeige.attention.head_count_kv": 2,
        "nanbeige.context_length": 128,
        "tokenizer.ggml.pre": "smollm",
    }
    for key, wanted in keys.items():
        assert value(path, key) == wanted, key
    found = {tensor.name: tensor for tensor in reader.tensors}
    state = made.model.state_dict()
    assert len(found) == len(state)
    query = state["layers.1.attention.qkv_linear.wq.weight"]
    np.testing.assert_array_equal(found["blk.1.attn_q.weight"].data, neighbours(query, 4).numpy())
    np.testing.assert_array_equal(found["output_norm.weight"].data, state["norm.weight"].numpy())
