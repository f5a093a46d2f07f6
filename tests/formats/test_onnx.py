"""Exported ONNX files in onnxruntime: logits, tokens and exit steps of our own engine."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.families.ouro.hugging_face.conftest import (
    convert,
    randomise,
    tokenizer_file,  # noqa: F401
    write_run,
)
from tests.models.dense_blocks import BLOCKS
from titan_loop.cli import main as cli
from titan_loop.formats import onnx_file
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import QExit
from titan_loop.inference.rows import Request
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, get_family
from titan_loop.text.tokenizer import load_tokenizer

VOCABULARY, WINDOW = 300, 256
PROMPT = [5, 9, 100, 33, 270, 12]
CLOSE = 1e-4  # of the largest logit; fp32 sums in another order
SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}
GATED = {**SPLIT, "exit_gate": True}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "ouro": ("ouro", {}),
    "prelude and coda": ("nanbeige", {**GATED, "norm_placement": "every_step"}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **LONG,
    "tied": ("ouro", {"n_kv_heads": 2, "tie_weights": True, "rope_theta": 500.0}),
    "no gate": ("ouro", {"exit_gate": False, "n_layers": 1}),
    "scaled": ("ouro", {**SPLIT, "norm_placement": "readout", "scale_embeddings": True}),
    "nanbeige": ("nanbeige", {"n_kv_heads": 1, "branch_scale": 2.0}),
    "coda without gate": ("nanbeige", {"norm_placement": "every_step", **SPLIT}),
    "bridge": ("retrofit", {"bridge": True, "damping": 3, **GATED}),
    "bridge without gate": ("retrofit", {"bridge": True, **SPLIT}),
    "mixer": ("retrofit", {"mixer": True, **GATED}),
    "mixer of noise": ("retrofit", {"mixer": True, "start_noise": 0.5, **SPLIT}),
    **{name: ("retrofit", {**GATED, **block}) for name, block in BLOCKS.items()},
}


class Exported(NamedTuple):
    """A model, its run, and the folder of its file."""

    model: LoopDecoder
    run: Path
    folder: Path


def write(place: Path, family: str, **options: Any) -> tuple[LoopDecoder, Path]:
    chosen = get_family(family).options(**{"vocab_size": VOCABULARY, **options})
    torch.manual_seed(20)
    model = build_decoder(chosen, max_seq_len=WINDOW).eval()
    randomise(model)
    if chosen.tie_weights:
        model.lm_head.weight = model.tok_embeddings.weight
    if model.exit_gate is not None:
        torch.nn.init.normal_(model.exit_gate.weight, std=0.2)
        torch.nn.init.constant_(model.exit_gate.bias, -1.0)
    write_run(place / "run", chosen, model)  # type: ignore[arg-type]
    return model, place / "run"


def export(place: Path, family: str, *flags: object, **options: Any) -> Exported:
    model, run = write(place, family, **options)
    flags = flags or ("--no-tokenizer",)
    convert("export", run, "--to", "onnx", "--output", place / "model", *flags)
    return Exported(model, run, place / "model")


@pytest.fixture(scope="session")
def onnxruntime() -> ModuleType:
    """Return the package, whose environment `tools/test_engines.sh` makes."""
    pytest.importorskip("onnx", reason="see tools/test_engines.sh")
    return pytest.importorskip("onnxruntime", reason="see tools/test_engines.sh")


class Session:
    """A file in onnxruntime, and the keys and values of the tokens that it has read."""

    def __init__(self, folder: Path, options: Any = None) -> None:
        import onnxruntime  # pyright: ignore[reportMissingImports]

        self.config = json.loads((folder / "config.json").read_text())
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        self.clear()

    def clear(self) -> None:
        slots = self.config["slots_outside"] + self.config["slots_per_step"]
        heads, width = self.config["num_key_value_heads"], self.config["head_dim"]
        self.past = [np.zeros((slots, 1, heads, 0, width), np.float32)] * 2

    def __call__(self, ids: list[int], steps: int, threshold: float = 1.0) -> tuple[Any, int]:
        """Read tokens; return the logits after the last one, and its exit step."""
        feeds = {"input_ids": np.array([ids]), "steps": np.array(steps)}
        feeds |= dict(zip(("past_keys", "past_values"), self.past, strict=True))
        if self.config["exit_gate"]:
            feeds["threshold"] = np.array(threshold, np.float32)
        logits, *self.past, left = self.session.run(None, feeds)
        return logits[0], int(left)

    def greedy(
        self, prompt: list[int], tokens: int, steps: int, threshold: float = 1.0
    ) -> tuple[list[int], list[int], np.ndarray]:
        """Return tokens, their exit steps, and the logits that each was chosen from."""
        ids, exits, rows = [*prompt], [], []
        new = prompt
        for _ in range(tokens):
            logits, left = self(new, steps, threshold)
            new = [int(logits.argmax())]
            ids, exits, rows = ids + new, [*exits, left], [*rows, logits]
        return ids[len(prompt) :], exits, np.stack(rows)


def ours(
    model: LoopDecoder, prompt: list[int], tokens: int, steps: int, threshold: float, **engine: Any
) -> tuple[list[int], list[int], np.ndarray]:
    """Return the same of our engine."""
    policy = None if model.exit_gate is None else QExit(threshold)
    made = Engine(model, recurrent_steps=steps, exit_policy=policy, **engine)
    rows: list[torch.Tensor] = []

    def readout(read_BLD: torch.Tensor) -> torch.Tensor:
        rows.append(model.readout(read_BLD)[0, 0])
        return rows[-1][None, None]

    made.stack.readout = readout
    [found] = made.complete([Request(prompt=prompt, max_new_tokens=tokens)])
    return found.tokens, found.steps, torch.stack(rows).numpy()


def assert_equal(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert found[:2] == wanted[:2]
    assert np.abs(found[2] - wanted[2]).max() <= CLOSE * np.abs(wanted[2]).max()


@pytest.mark.engines
@pytest.mark.parametrize("name", MODELS)
def test_tokens_exits_and_logits_are_our_engines(onnxruntime, tmp_path, name):
    family, options = MODELS[name]
    made = export(tmp_path, family, **options)
    tokens, thresholds = (200, (0.3, 0.6, 0.9, 1.0)) if name in LONG else (24, (0.5, 1.0))
    session, gated = Session(made.folder), made.model.exit_gate is not None
    exits: set[int] = set()
    for steps in (1, 2, 4):
        for threshold in thresholds if gated else (1.0,):
            session.clear()
            found = session.greedy(PROMPT, tokens, steps, threshold)
            assert_equal(found, ours(made.model, PROMPT, tokens, steps, threshold))
            exits |= {*found[1]}
    assert exits >= ({1, 2, 4} if gated else {4})  # no case is equal for want of exits


@pytest.mark.engines
def test_a_prompt_may_come_in_parts(onnxruntime, tmp_path):
    made = export(tmp_path, "nanbeige", **GATED, window=4)
    whole, parts = Session(made.folder), Session(made.folder)
    want, left = whole(PROMPT, 4, 0.5)
    parts(PROMPT[:2], 4, 0.5)
    found, left_of_parts = parts(PROMPT[2:], 4, 0.5)
    np.testing.assert_allclose(found, want, atol=1e-5)
    for part, other in zip(parts.past, whole.past, strict=True):
        np.testing.assert_allclose(part, other, atol=1e-5)
    assert left == left_of_parts


@pytest.mark.engines
def test_a_prompt_of_one_token_runs_all_steps_too(onnxruntime, tmp_path):
    made = export(tmp_path, "ouro")
    found = Session(made.folder).greedy([5], 24, 4, 0.1)
    assert_equal(found, ours(made.model, [5], 24, 4, 0.1))
    assert found[1][0] < 4  # its later steps leave keys, though it was read before them


@pytest.mark.engines
@pytest.mark.parametrize(("first", "then"), [(2, 4), (1, 3)])
def test_deeper_steps_see_the_deepest_of_a_shallower_past(onnxruntime, tmp_path, first, then):
    made = export(tmp_path, "ouro", exit_gate=False)
    session = Session(made.folder)
    session(PROMPT[:-1], first)
    found = session.greedy(PROMPT[-1:], 24, then)
    assert_equal(found, ours(made.model, PROMPT, 24, then, 1.0, prefill_steps=first))
    session(PROMPT, first)
    assert len(session.past[0]) == first * session.config["slots_per_step"]  # drops the others


@pytest.mark.engines
def test_every_layer_stands_once_whatever_the_steps(onnxruntime, tmp_path):
    import onnx  # pyright: ignore[reportMissingImports]

    made = export(tmp_path, "ouro", recurrent_steps=8)
    convert(
        *("export", made.run, "--to", "onnx", "--output", tmp_path / "shallow", "--no-tokenizer"),
        *("--recurrent-steps", 1),
    )
    file = (made.folder / "model.onnx").read_bytes()
    assert file == (tmp_path / "shallow" / "model.onnx").read_bytes()
    graph = onnx.load_from_string(file).graph
    [loop] = [node for node in graph.node if node.op_type == "Loop"]
    kinds = [node.op_type for node in loop.attribute[0].g.node]
    assert kinds.count("Attention") == 2
    parameters = sum(each.numel() for each in made.model.parameters())
    assert len(file) < 4.1 * parameters + 40_000


FEW_BITS: list[tuple[str, dict[str, Any], int]] = [
    ("ouro", {"tie_weights": True}, 10),
    ("retrofit", {"bridge": True, **GATED, "head_dim": 32}, 15),
    ("retrofit", {"mixer": True, "attention_biases": "qkv", **SPLIT}, 11),
]
"""Models, and the number of matrices in the loop's body."""


@pytest.mark.engines
@pytest.mark.parametrize(("family", "options", "matrices"), FEW_BITS)
@pytest.mark.parametrize("bits", [8, 4])
def test_in_few_bits_it_computes_with_the_stored_weights(
    onnxruntime, tmp_path, family, options, matrices, bits
):
    import onnx  # pyright: ignore[reportMissingImports]

    from titan_loop.formats.onnx_graph import quantised

    model, _, folder = export(
        *(tmp_path, family, "--dtype", f"int{bits}", "--no-tokenizer"), **options
    )
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    exact = Session(folder, plain)
    usual = onnxruntime.SessionOptions()
    usual.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    usual.log_severity_level = 3  # that file is for this machine
    fast = Session(folder, usual)

    def stored(weight: np.ndarray) -> torch.Tensor:
        whole, scale = quantised(weight.T, bits, 32)
        return torch.from_numpy((whole * scale.repeat(32, 0)).T.astype(np.float32))

    head = stored(model.lm_head.weight.detach().numpy())
    for each, parameter in model.named_parameters():
        if parameter.ndim == 2 and "exit_gate" not in each and "tok_emb" not in each:
            parameter.data = stored(parameter.detach().numpy())
    rows = model.tok_embeddings.weight.detach()
    scale = rows.abs().amax(1, keepdim=True) / 127
    model.lm_head.weight = torch.nn.Parameter(head)  # no longer the embedding, if it was
    model.tok_embeddings.weight = torch.nn.Parameter((rows / scale).round() * scale)
    for threshold in (0.5, 1.0):
        exact.clear()
        wanted = ours(model, PROMPT, 64, 4, threshold)
        assert_equal(exact.greedy(PROMPT, 64, 4, threshold), wanted)
    fast.clear()
    found, wanted = (session(PROMPT, 1)[0] for session in (fast, Session(folder, plain)))
    assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()  # activations in 8 bits
    graph = onnx.load(tmp_path / "optimised.onnx").graph
    [loop] = [node for node in graph.node if node.op_type == "Loop"]
    kinds = [node.op_type for node in loop.attribute[0].g.node]
    assert kinds.count("MatMulNBits") == matrices
    assert "DequantizeLinear" not in kinds


@pytest.mark.engines
@pytest.mark.parametrize("bits", [8, 4])
def test_every_block_has_a_scale_that_its_largest_element_fills(onnxruntime, bits):
    from titan_loop.formats.onnx_graph import quantised

    weight = np.random.default_rng(0).normal(size=(96, 7)).astype(np.float32)
    weight[:32, 0] = 0
    whole, scale = quantised(weight, bits, 32)
    assert whole.min() == -(2 ** (bits - 1))
    assert whole.max() <= 2 ** (bits - 1) - 1
    blocks = (whole.reshape(3, 32, 7) * scale[:, None] - weight.reshape(3, 32, 7)) / scale[:, None]
    assert np.abs(blocks).max() <= 1  # where the largest element's opposite is clipped
    assert (np.abs(blocks) > 0.5001).mean() < 0.02
    largest = np.abs(weight.reshape(3, 32, 7)).argmax(1)[:, None]
    assert np.abs(np.take_along_axis(blocks, largest, 1)).max() < 1e-6


@pytest.mark.engines
def test_the_folders_own_program_writes_our_text(onnxruntime, tmp_path, tokenizer_file):  # noqa: F811
    made = export(tmp_path, "ouro", "--tokenizer", tokenizer_file)
    words = ["def f(", "20", "3", "0.6"]
    program = [sys.executable, str(made.folder / "generate.py"), *words]
    answer = json.loads(subprocess.run(program, capture_output=True, check=True).stdout)
    tokenizer = load_tokenizer(tokenizer_file)
    prompt = tokenizer.encode("def f(").ids
    ids, exits, _ = ours(made.model, prompt, 20, 3, 0.6)
    assert answer["ids"] == ids
    assert answer["exit_steps"] == exits
    assert answer["text"] == tokenizer.decode(ids)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("moe", {}, "model.family=moe: the onnx format holds models of nanbeige, ouro, retrofit"),
    ("ouro", {"readout_rank": 2}, "model.readout_rank=2: the onnx format has no place for it"),
    ("ouro", {"positions": "none"}, "model.positions=none: the onnx format has no place"),
    ("nanbeige", {"injection": "additive"}, "model.injection=additive: the onnx format has no"),
    ("retrofit", {"adapter_rank": 2}, "model.adapter_rank=2: the onnx format has no place"),
]


@pytest.mark.parametrize(("family", "options", "words"), REFUSED)
def test_what_it_cannot_hold_is_refused_by_name(tmp_path, capsys, family, options, words):
    _, run = write(tmp_path, family, **options)
    flags = ["--to", "onnx", "--output", str(tmp_path / "model"), "--no-tokenizer"]
    assert cli.main(["convert", "export", str(run), *flags]) == 2
    assert words in capsys.readouterr().err
    assert cli.main(["convert", "export", str(run), "--list"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("onnx ")]
    assert f"no: {words}" in row
    assert not [*tmp_path.rglob("*model*")]


def test_without_the_package_or_above_2_gib_nothing_is_written(tmp_path, capsys, monkeypatch):
    _, run = write(tmp_path, "ouro")
    command = ["convert", "export", str(run), "--to", "onnx", "--no-tokenizer", "--output"]
    monkeypatch.setitem(sys.modules, "titan_loop.formats.onnx_graph", None)
    assert cli.main([*command, str(tmp_path / "model")]) == 2
    assert "pip install 'titan-loop[onnx]'" in capsys.readouterr().err
    monkeypatch.setattr(onnx_file, "_MOST_BYTES", 1000)
    assert cli.main([*command, str(tmp_path / "model")]) == 2
    assert "--to=onnx: a file holds at most 2 GiB" in capsys.readouterr().err
    model, run = write(tmp_path / "tied", "ouro", tie_weights=True)
    count = sum(each.numel() for each in {*model.parameters()})
    monkeypatch.setattr(onnx_file, "_MOST_BYTES", count)  # int8 adds scales, and the head
    small = ["convert", "export", str(run), *command[3:], str(tmp_path / "tied/model")]
    assert cli.main([*small, "--dtype", "int8"]) == 2
    assert "--to=onnx: a file holds at most 2 GiB" in capsys.readouterr().err
    _, run = write(tmp_path / "odd", "ouro", hidden_dim=100)
    odd = ["convert", "export", str(run), *command[3:], str(tmp_path / "odd/model")]
    assert cli.main([*odd, "--dtype", "int4"]) == 2
    assert "needs a multiple of 32 as model.hidden_dim, not 100" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*model*")]
