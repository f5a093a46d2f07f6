"""Exported models in llama.cpp: logits, greedy tokens, tokenizers, quantised weights."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from torch.nn.functional import cross_entropy

from tests.contracts.folders import opened
from tests.models.dense_blocks import BLOCKS
from tests.support.llama_cpp import CLOSE, PROMPT, TOKENS, as_matrix, ask, export, log_probs
from tests.support.llama_runs import UNSPLIT, VOCABULARY, maker, train_tokenizer
from tests.support.tiny import standard_library_texts, tiny_config
from titan_loop.data.load.held_out_windows import held_out_windows
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.formats import gguf_tokenizer
from titan_loop.formats.gguf_pretokenizers import PRE_TOKENIZERS, Match, pre_tokenizer
from titan_loop.formats.gguf_types import MIXTURES
from titan_loop.formats.llama_cpp_process import Model
from titan_loop.formats.stress_texts import stress_texts
from titan_loop.models.dense import DenseOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.text.chat_template import ChatTemplate
from titan_loop.text.conversation import Conversation, parse_messages
from titan_loop.text.tokenizer import load_tokenizer
from tools import few_bits
from train_configs.nanbeige.recipes import TYPES

QUANTISE = Path(__file__).parents[2] / "support" / "quantise_driver.py"
CHAT = Path(__file__).parents[3] / "tools" / "chat.py"
BITS_CLOSE = {"float32": 5e-4, "q8_0": 5e-3, "q6_k": 2e-2, "q4_k_m": 5e-2, "q4_0": 5e-2}
"""Bits per byte that each type may change, of about 4."""
STEPS, WINDOW = 80, 64

pytestmark = pytest.mark.engines


LOOPS = {
    f"R{steps}-{norm}": {"recurrent_steps": steps, "norm_placement": norm}
    for steps in (1, 2, 3, 4)
    for norm in ("readout", "every_step")
}
SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}
LOOPED = {"n_layers": 4, "recurrent_steps": 2}
# Kinds of layers that llama.cpp can say once every visit is one.
PERIOD = {"window": 5, "windowed_layers": (0, 2)}
SCALE = {"attention_scale": 0.25, **PERIOD}  # of heads of 16
DENSE = {
    **{name: {**LOOPED, **BLOCKS[name]} for name in ("llama3", "qwen2", "olmo2", "granite")},
    "qwen3": {**LOOPED, "qk_norm": "head", "head_dim": 32},
    "gemma2": {**LOOPED, **BLOCKS["gemma2"], **SCALE, "tie_weights": True},
    "gemma3": {**LOOPED, **BLOCKS["gemma3"], **SCALE},
    "smollm3": {**LOOPED, "unrotated_layers": (3,)},
    "phi3": {**LOOPED, **BLOCKS["phi3"]},
    "olmo3": {**LOOPED, **BLOCKS["olmo2"], **PERIOD, "windowed_layers": (0, 1, 2)},
    "biased": {**LOOPED, "attention_biases": "qkvo", "feed_forward_biases": True},
}


@pytest.mark.parametrize(
    ("to", "options"),
    [
        *(("gguf", options) for options in LOOPS.values()),
        ("gguf", {"n_kv_heads": 1, "tie_weights": True, "rope_theta": 500.0}),
        ("gguf-unrolled", {"recurrent_steps": 3}),
        ("gguf-unrolled", SPLIT),
        ("gguf-unrolled", {**SPLIT, "n_kv_heads": 4, "recurrent_steps": 4}),
        *(("gguf-unrolled", options) for options in DENSE.values()),
    ],
    ids=[*LOOPS, "one-kv-head", "unrolled-stack", "unrolled-core", "unrolled-core-R4", *DENSE],
)
def test_greedy_tokens_and_logits_are_ours(
    python, make_run, tmp_path, ascii_tokenizer, to, options
):
    made = make_run(**options)
    flags = ("--to", to, "--tokenizer", ascii_tokenizer)
    file = export(made.run, tmp_path / "model.gguf", *flags)
    request = {"prompt": PROMPT, "count": TOKENS, "vocabulary": VOCABULARY}
    (answer,) = ask(python, file, request)
    ours = log_probs(made.model, PROMPT + answer["tokens"], made.model.recurrent_steps)
    ours = ours[len(PROMPT) - 1 : -1]
    assert answer["tokens"] == ours.argmax(-1).tolist()
    close = CLOSE * (4 if options.get("activation") == "gelu" else 1)  # a table in fp16
    torch.testing.assert_close(as_matrix(answer), ours, atol=close, rtol=0)


@pytest.mark.parametrize("digits", [True, False], ids=["digits", "no-digits"])
def test_a_thousand_documents_have_the_same_ids(python, make_run, tmp_path, digits):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", digits=digits, every_byte=True)
    made = make_run(vocab_size=VOCABULARY + 100)
    flags = ("--to", "gguf", "--tokenizer", tokenizer)
    file = export(made.run, tmp_path / "model.gguf", *flags)
    text = (
        "".join(standard_library_texts(60))
        + "Éa été: naïve  \t12345 3.14 漢字 🙂\r\n\n  I'll DON'T they've\n" * 40
    )
    size = len(text) // 1000
    documents = [text[start : start + size] for start in range(0, size * 1000, size)]
    ours = load_tokenizer(tokenizer)
    answers = ask(python, file, *({"text": document} for document in documents))
    for document, answer in zip(documents, answers, strict=True):
        assert answer == ours.encode(document).ids, document


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_pre_tokenizer_is_llama_cpps(
    wheel, make_run, tmp_path, unsplit_tokenizer, caplog, name
):
    tokenizer = load_tokenizer(unsplit_tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    record = json.loads(tokenizer.to_str())
    record["model"]["ignore_merges"] = PRE_TOKENIZERS[name].ignores_merges
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(record))
    flags = ("--to", "gguf", "--tokenizer", path)
    export(make_run(vocab_size=UNSPLIT).run, tmp_path / "model.gguf", *flags)
    assert "built-in texts" not in caplog.text


def test_ids_that_nothing_explains_are_warned_of(
    wheel, make_run, tmp_path, unsplit_tokenizer, caplog, monkeypatch
):
    monkeypatch.setattr(gguf_tokenizer, "nearest", lambda record: Match("bloom", 0))
    flags = ("--to", "gguf", "--tokenizer", unsplit_tokenizer)
    export(make_run(vocab_size=UNSPLIT).run, tmp_path / "model.gguf", *flags)
    first = repr(stress_texts()[0])[:40]
    assert f"the first of them {first}" in caplog.text
    assert "which nothing above explains" in caplog.text


def test_every_end_of_the_model_ends_an_answer(wheel, make_run, tmp_path):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", digits=True, every_byte=True)
    record = json.loads(tokenizer.read_text().replace("<|endoftext|>", "~end~"))
    tokenizer.write_text(json.dumps(record))
    made = make_run(vocab_size=VOCABULARY + 100)
    flags = ("--to", "gguf", "--tokenizer", tokenizer, "--eos-token", "~end~", "--chatml")
    file = export(made.run, tmp_path / "model.gguf", *flags)
    model = Model(str(wheel), str(file))
    names = ("~end~", "<|im_end|>", "<|im_start|>", "a")
    ids = load_tokenizer(tokenizer).get_vocab()
    assert [model.ends(ids[name]) for name in names] == [True, True, False, False]


def test_chats_are_written_as_in_training(python, make_run, tmp_path):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", digits=True, every_byte=True)
    made = make_run(vocab_size=VOCABULARY + 100)
    flags = ("--to", "gguf", "--tokenizer", tokenizer, "--chatml")
    file = export(made.run, tmp_path / "model.gguf", *flags)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": [1, "é"]}'}}
    parameters = {"type": "object", "properties": {"a": {"type": "array"}}}
    add = {"name": "add", "description": "Adds <é>.", "parameters": parameters}
    chats = [
        {"messages": [{"role": "user", "content": " Hi <b>&\"'é漢\n"}]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "Wait.", "tool_calls": [{**call, "id": "c"}] * 2},
                {"role": "tool", "tool_call_id": "c", "content": "2"},
                {"role": "assistant", "content": "2", "reasoning_content": "It says so."},
                {"role": "user", "content": "Good."},
            ],
            "tools": [{"type": "function", "function": add}],
        },
    ]
    for chat, answer in zip(chats, ask(python, file, *chats), strict=True):
        turns = parse_messages(chat["messages"])
        ours = Conversation(tuple(turns), tuple(chat.get("tools", ())))
        assert answer == ChatTemplate().prompt(ours)


WIDE = {"dim": 256, "hidden_dim": 512, "n_layers": 9}


@pytest.mark.parametrize(
    ("to", "options", "others"),
    [
        ("gguf", {**WIDE, "recurrent_steps": 1}, ()),
        ("gguf", {**WIDE, "recurrent_steps": 2}, ("ffn_down",)),
        ("gguf-unrolled", {**WIDE, "n_layers": 4, "recurrent_steps": 2}, ()),
        ("gguf-unrolled", {**WIDE, "recurrent_steps": 1, **BLOCKS["phi3"]}, ()),
        ("gguf", {"dim": 96, "hidden_dim": 160, "recurrent_steps": 1, "tie_weights": True}, ()),
        ("gguf", {"dim": 72, "hidden_dim": 288, "recurrent_steps": 1}, ()),
    ],
    ids=["stack", "loop", "unrolled", "fused", "coarser-tied", "fp16"],
)
def test_few_bits_are_llama_cpps_but_for_what_it_counts_by_loops(
    wheel, quantiser, make_run, tmp_path, to, options, others
):
    run = make_run(**options).run
    flags = ("--to", to, "--no-tokenizer", "--dtype")
    source = export(run, tmp_path / "source.gguf", *flags, "float32")
    for dtype in ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"):
        file = export(run, tmp_path / f"{dtype}.gguf", *flags, dtype)
        want = tmp_path / "want.gguf"
        words = [quantiser, source, want, int(MIXTURES[dtype].file)]
        subprocess.run([sys.executable, QUANTISE, *map(str, words)], check=True)
        pairs = [
            {
                each.name: (each.tensor_type, each.data.tobytes())
                for each in GGUFReader(path).tensors
            }
            for path in (file, want)
        ]
        ours, theirs = pairs
        assert ours.keys() == theirs.keys()
        differ = {name.split(".")[2] for name in ours if ours[name] != theirs[name]}
        assert differ == {*(others if dtype.endswith("_m") else ())}, dtype


def test_held_out_text_is_measured_in_llama_cpp_for_every_depth(
    wheel, source, tmp_path, alone, capfd
):
    config = tiny_config(source, tmp_path / "run", steps=STEPS)
    config.model = DenseOptions(initializer_range=0.1, dim=256, n_heads=4)
    config.training.seq_len = WINDOW
    run_recipe(
        Recipe(name="one", stages=[Stage(name="one", config=config)]), folder=tmp_path / "run"
    )
    steps = ("--measure-steps", "1", "2", "3")
    measure = ("--measure", source, *steps, "--measure-windows", "8")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for dtype in ("float32", "q8_0", "q6_k", "q4_k_m", "q4_0"):
        capfd.readouterr()
        file = tmp_path / f"{dtype}.gguf"
        export(tmp_path / "run", file, "--to", "gguf", "--dtype", dtype, *measure)
        head, *rows = (line.split() for line in capfd.readouterr().out.splitlines()[-4:])
        assert head == ["source", "R", "run", "llama.cpp", "difference"]
        found[dtype] = {row[1]: (float(row[2]), float(row[3])) for row in rows}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["run", *(f"{dtype}.gguf" for dtype in found)]
    )
    windows = held_out_windows(source, seq_len=WINDOW, count=8)
    with torch.no_grad():
        output = opened(tmp_path / "run")(windows.input, windows.positions, recurrent_steps=3)
        logits = opened(tmp_path / "run").readout(output.hidden_RBLD[-1])
    nats = cross_entropy(logits.flatten(0, 1), windows.labels.flatten(), reduction="sum")
    bits = float(nats) / math.log(2) / float(windows.label_bytes.sum())
    print(found)
    assert found["float32"]["3"][0] == pytest.approx(bits, abs=1e-4)
    for step, (ours, _) in found["float32"].items():
        for dtype, close in BITS_CLOSE.items():
            assert found[dtype][step][0] == ours < 5  # it has learned
            assert found[dtype][step][1] == pytest.approx(ours, abs=close), (dtype, step)
            assert dtype in ("float32", "q8_0") or found[dtype][step][1] != ours
    study = few_bits.measure(tmp_path / "run")
    assert {name.rpartition("/")[2] for name in study} == {"run", *TYPES}
    assert study.pop(f"held_out/{source.name}/bits_per_byte/run") < 5
    for name, added in study.items():
        assert 0 < abs(added) < BITS_CLOSE["q4_0"], name


def test_the_chat_answers_or_says_why_not(python, make_run, tmp_path_factory, tmp_path):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", digits=True, every_byte=True)
    runs = make_run(vocab_size=400).run, maker(OuroOptions, tmp_path_factory)(vocab_size=400).run
    chat = ("--tokenizer", tokenizer, "--chatml")
    for run, flags, error in (
        (runs[0], chat, None),
        (runs[0], ("--tokenizer", tokenizer, "--no-chatml"), None),
        (runs[0], ("--no-tokenizer",), "has no tokenizer, which llama.cpp's server needs"),
        (runs[1], chat, "no released llama.cpp knows its architecture 'ouro'"),
    ):
        file = export(run, tmp_path / f"{len([*tmp_path.iterdir()])}.gguf", "--to", "gguf", *flags)
        words = [python, str(CHAT), str(file), "--tokens", "4"]
        asked = subprocess.run(words, input="Hi\n", capture_output=True, text=True, check=False)
        assert asked.returncode == (2 if error else 0), asked.stderr
        assert (error or ("Your turn:" if flags == chat else "A text to")) in asked.stderr
        assert bool(asked.stdout) == (error is None)
