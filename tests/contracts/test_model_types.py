"""Every dense model of transformers in and out: logits, documents, generation, tensors, fields."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.contracts.folders import opened
from tests.families.ouro.hugging_face.conftest import convert
from titan_loop.cli import main as cli
from titan_loop.formats.model_types import MODEL_TYPES, NOT_DENSE
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.models.decoder import LoopDecoder

VOCABULARY, WINDOW = 300, 6
CLOSE = 1e-5  # fp32 sums in another order
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 16, "rope_theta": 1e6, "rope_scaling": YARN, "tie_word_embeddings": True},
    "olmo2": {"rope_theta": 5e5},
    "olmo3": {"rope_theta": 5e5, "sliding_window": WINDOW, "rope_scaling": YARN},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                    "sliding_window_pattern": 3},
    "smollm3": {},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                "attention_multiplier": 0.2, "logits_scaling": 3.0},
    "phi3": {"num_attention_heads": 3, "num_key_value_heads": 3, "partial_rotary_factor": 0.5,
             "sliding_window": WINDOW},
}  # fmt: skip
IDS = torch.arange(2 * 40).view(2, 40) * 7 % 290 + 3
IGNORED = {
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "head_dim", "attention_bias", "mlp_bias"),
    *("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "rope_scaling"),
    *("rope_parameters", "rope_theta", "no_rope_layer_interval", "use_cache"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
}
"""Fields of tokens and of how a folder was written, and others that logits compare better."""


class Imported(NamedTuple):
    """A model of transformers, its run here, and both models."""

    theirs: Any
    run: Path
    ours: LoopDecoder


def load(library: Any, folder: Path) -> Any:
    return library.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module", params=MODEL_TYPES)
def imported(request, transformers, tmp_path_factory) -> Imported:
    name, place = request.param, tmp_path_factory.mktemp(request.param)
    # A copy: transformers 5 writes the base into the object that it is given.
    config = transformers.AutoConfig.for_model(name, **deepcopy({**SHAPE, **OWN[name]}))
    torch.manual_seed(0)
    model = getattr(transformers, MODEL_TYPES[name].architecture)(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            one = "norm" in key and "gemma" not in name
            parameter.copy_(
                torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3) + one
            )
    model.save_pretrained(place / "source")
    convert("import", place / "source", "--output", place / "run")
    return Imported(load(transformers, place / "source"), place / "run", opened(place / "run"))


def ours(model: LoopDecoder, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    return model.readout(model(ids, positions).hidden_RBLD[-1])


def test_every_model_type_has_a_case():
    assert OWN.keys() == MODEL_TYPES.keys()
    assert not MODEL_TYPES.keys() & NOT_DENSE.keys()


@pytest.mark.parametrize(
    ("name", "own", "window"),
    [
        ("qwen2", {"max_window_layers": 2}, {}),  # as in the released models
        ("qwen3", {"max_window_layers": 2}, {}),
        ("smollm3", {}, {}),
        (
            "smollm3",
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            {"window": WINDOW, "windowed_layers": (3,), "window_rope_theta": None},
        ),
    ],
)
def test_use_sliding_window_turns_a_window_off_as_in_their_class(name, own, window):
    off = {"sliding_window": WINDOW, "use_sliding_window": False}
    options = MODEL_TYPES[name].read({**SHAPE, **off, **own})
    assert {key: value for key, value in options.items() if "window" in key} == window


@torch.no_grad()
def test_logits_are_theirs_for_whole_padded_and_packed_windows(imported):
    want = imported.theirs(IDS).logits
    torch.testing.assert_close(ours(imported.ours, IDS), want, atol=CLOSE, rtol=0)
    mask = torch.ones_like(IDS)
    mask[0, 30:] = 0
    padded = imported.theirs(IDS, attention_mask=mask).logits
    torch.testing.assert_close(ours(imported.ours, IDS)[0, :30], padded[0, :30], atol=CLOSE, rtol=0)
    positions = torch.cat([torch.arange(23), torch.arange(17)]).expand(2, -1)
    packed = ours(imported.ours, IDS, positions)
    for part in (slice(23), slice(23, None)):
        alone = imported.theirs(IDS[:, part]).logits
        torch.testing.assert_close(packed[:, part], alone, atol=CLOSE, rtol=0)


@torch.no_grad()
def test_states_after_every_layer_are_theirs(imported):
    want = imported.theirs(IDS, output_hidden_states=True).hidden_states
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda *called: found.append(called[-1]))
        for layer in imported.ours.layers.values()
    ]
    imported.ours(IDS)
    for hook in hooks:
        hook.remove()
    for state, theirs in zip(found[:-1], want[1:-1], strict=True):  # the last one is normed there
        scale = float(theirs.abs().max())
        torch.testing.assert_close(state, theirs, atol=CLOSE * max(1.0, scale), rtol=0)


@torch.no_grad()
def test_generation_through_the_cache_is_theirs(imported):
    prompts = [IDS[0, :9].tolist(), IDS[1, :4].tolist()]
    requests = [Request(prompt=prompt, max_new_tokens=12) for prompt in prompts]
    for prompt, completion in zip(prompts, Engine(imported.ours).complete(requests), strict=True):
        asked = torch.tensor([prompt])
        said = imported.theirs.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        assert completion.tokens == said[0, len(prompt) :].tolist()


@torch.no_grad()
def test_the_export_is_the_source_bit_by_bit(imported, transformers, tmp_path):
    arguments = ("--to", "llama-unrolled", "--output", tmp_path / "out", "--no-tokenizer")
    convert("export", imported.run, *arguments)
    again = load(transformers, tmp_path / "out")
    before, after = imported.theirs.state_dict(), again.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(again(IDS).logits, imported.theirs(IDS).logits)
    fields = [model.config.to_dict() for model in (imported.theirs, again)]
    for name in fields[0].keys() - IGNORED:
        assert fields[1].get(name) == fields[0][name], name


@torch.no_grad()
def test_a_loop_of_one_step_is_the_source_and_unrolls_into_its_class(
    imported, transformers, tmp_path, capsys
):
    flags = ("--prelude", "0", "--core", "4", "--coda", "0", "--recurrent-steps", "2")
    arguments = ("--output", str(tmp_path / "loop"), "--mode", "plain", *flags)
    assert cli.main(["retrofit", str(imported.run), *arguments]) == 0
    loop = opened(tmp_path / "loop")
    once = loop.readout(loop(IDS, recurrent_steps=1).hidden_RBLD[-1])
    assert torch.equal(once, ours(imported.ours, IDS))
    out = ("--to", "llama-unrolled", "--output", tmp_path / "out", "--no-tokenizer")
    convert("export", tmp_path / "loop", *out)
    unrolled = load(transformers, tmp_path / "out")
    assert unrolled.config.model_type == imported.theirs.config.model_type
    twice = loop.readout(loop(IDS, recurrent_steps=2).hidden_RBLD[-1])
    torch.testing.assert_close(unrolled(IDS).logits, twice, atol=2 * CLOSE, rtol=0)
