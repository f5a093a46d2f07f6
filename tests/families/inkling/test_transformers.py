"""Inkling beside transformers' own: logits, padding, caches, gradients, folders."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.ouro.hugging_face.conftest import convert
from titan_loop.families.inkling.formats import InklingShape
from titan_loop.formats.importing import ModelFolder
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

pytestmark = pytest.mark.hf5

CLOSE = 1e-5  # fp32 sums in another order, of values of size 1
RELATIVE = 1e-4  # of a gradient's largest element
LENGTH, VOCABULARY = 40, 128
SHAPE: dict[str, Any] = {
    "vocab_size": 136,
    "unpadded_vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "layer_types": ["hybrid_sliding", "hybrid"] * 4,
    **{f"{swa}num_attention_heads": 4 for swa in ("", "swa_")},
    **{f"{swa}num_key_value_heads": 2 for swa in ("", "swa_")},
    **{f"{swa}head_dim": 16 for swa in ("", "swa_")},
    "sliding_window_size": 8, "d_rel": 4, "rel_extent": 12, "log_scaling_n_floor": 10,
    "qk_l2_clip_threshold": 2.0, "rel_l2_clip_threshold": 1.0, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_layers_per_attn_res_block": 2,
    "loop_layer_index_start": 2, "loop_layer_index_end": 6, "loop_gate_rank": 4,
    "max_position_embeddings": 128, "eos_token_id": None,
}  # fmt: skip


def saved(transformers5: ModuleType, place: Path, passes: int) -> Any:
    """Return their model, whose every weight matters; it is also saved."""
    config = transformers5.AutoConfig.for_model(
        "inkling2_loop_text", **SHAPE, loop_num_passes=passes
    )
    torch.manual_seed(0)
    theirs = transformers5.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in theirs.named_buffers():
            if "correction" in name:
                buffer.add_(torch.randn_like(buffer) * 0.1)
    theirs.save_pretrained(place)
    return theirs


@pytest.fixture(params=[1, 2, 3])
def pair(request, transformers5, tmp_path) -> tuple[LoopDecoder, Any, InklingShape]:
    """Return our model and theirs, with the same random weights."""
    theirs = saved(transformers5, tmp_path / "made", request.param)
    folder = ModelFolder(tmp_path / "made")
    assert isinstance(folder.shape, InklingShape)
    assert folder.shape.recurrent_steps == request.param
    return folder.build(), theirs, folder.shape


def tokens(rows: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(5))


def logits(model: LoopDecoder, ids: Tensor) -> Tensor:
    return model.readout(model(ids).hidden_RBLD[-1])


@torch.no_grad()
def test_logits_with_padding_on_both_sides(pair):
    ours, theirs, _ = pair
    ids, short = tokens(2), 29
    want = logits(ours, ids)
    torch.testing.assert_close(theirs(ids).logits, want, atol=CLOSE, rtol=0)
    alone = logits(ours, ids[:1, :short])[0]
    for left in (True, False):
        place = slice(LENGTH - short, LENGTH) if left else slice(0, short)
        padded, mask = torch.zeros_like(ids), torch.ones_like(ids)
        padded[1], mask[0] = ids[1], 0
        padded[0, place], mask[0, place] = ids[0, :short], 1
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        found = theirs(padded, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(found[0, place], alone, atol=CLOSE, rtol=0)
        torch.testing.assert_close(found[1], want[1], atol=CLOSE, rtol=0)


@torch.no_grad()
def test_every_layer_of_every_pass_reads_the_same_blocks_and_leaves_the_same_state(pair):
    ours, theirs, _ = pair
    visits: dict[str, list[list[Tensor]]] = {"ours": [], "theirs": []}

    def mine(layer: Any, given: Any, made: Any) -> None:
        hidden_BLD, _, _, blocks, *_ = given
        visits["ours"].append([hidden_BLD, *blocks, made[0]])

    def other(layer: Any, given: Any, named: Any, made: Tensor) -> None:
        hidden_BLD, blocks_BLND, *_ = given
        visits["theirs"].append([hidden_BLD, *blocks_BLND.unbind(-2), made])

    for layer in ours.layers.values():
        layer.register_forward_hook(mine)
    for layer in theirs.model.layers:
        layer.register_forward_hook(other, with_kwargs=True)
    ours(tokens(2), collect="last")
    theirs(tokens(2))
    assert len(visits["ours"]) == 2 + 4 * ours.recurrent_steps + 2
    for one, two in zip(visits["ours"], visits["theirs"], strict=True):
        for found, want in zip(one, two, strict=True):
            torch.testing.assert_close(found, want, atol=CLOSE, rtol=CLOSE)


@torch.no_grad()
def test_the_cache_goes_on_token_by_token_as_theirs(pair):
    ours, theirs, _ = pair
    prompts = [tokens(2)[0, :17].tolist(), tokens(2)[1, :4].tolist()]
    engine, read = Engine(ours), []
    stack: Any = engine.stack
    readout = stack.readout
    stack.readout = lambda x: read.append(readout(x)) or read[-1]
    together = engine.complete([Request(prompt=each, max_new_tokens=14) for each in prompts])
    for row, (prompt, completion) in enumerate(zip(prompts, together, strict=True)):
        out = theirs(torch.tensor([prompt]), use_cache=True)
        for index, token in enumerate(completion.tokens):
            torch.testing.assert_close(read[index][row], out.logits[0, -1:], atol=CLOSE, rtol=0)
            assert token == int(out.logits[0, -1].argmax())
            out = theirs(torch.tensor([[token]]), cache=out.cache, use_cache=True)
    steps, looped, outside = ours.cache_slots(ours.recurrent_steps)
    assert steps * looped + outside == theirs.config.total_num_hidden_layers


def test_gradients_of_all_parameters(pair, tmp_path):
    ours, theirs, shape = pair
    ids = tokens(2)
    weight = torch.randn(2, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
    (theirs(ids).logits * weight).sum().backward()
    (logits(ours, ids) * weight).sum().backward()
    # Their own way of saving gives gradients the names of the files.
    with torch.no_grad():
        for parameter in theirs.parameters():
            unused = parameter.grad is None
            parameter.copy_(torch.zeros_like(parameter) if unused else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    found = ModelFolder(tmp_path / "gradients")
    want = {shape.parameter_name(name): found.read(name, torch.float32) for name in found.names}
    for name, parameter in ours.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (parameter.grad is None) <= (shape.recurrent_steps == 1), name
        close = RELATIVE * max(float(want[name].abs().max()), 1e-6)
        torch.testing.assert_close(gradient, want[name], atol=close, rtol=0, msg=name)


@torch.no_grad()
def test_a_folder_with_vision_parts_is_imported_without_them(transformers5, tmp_path, caplog):
    from safetensors.torch import load_file, save_file

    theirs = saved(transformers5, tmp_path / "made", 2)
    want, ids = theirs(tokens(1)).logits, tokens(1)
    file, config = tmp_path / "made" / "model.safetensors", tmp_path / "made" / "config.json"
    text_parts = load_file(file)
    save_file({**text_parts, "model.visual.patch": torch.ones(2)}, file)
    text = json.loads(config.read_text())
    whole = {"model_type": "inkling2_loop", "text_config": text, "image_token_id": 3}
    config.write_text(json.dumps(whole))
    convert("import", tmp_path / "made", "--output", tmp_path / "run")
    assert "left out 1 tensors: model.visual.patch" in caplog.text
    convert("export", tmp_path / "run", "--to", "inkling", "--output", tmp_path / "out",
            "--no-tokenizer")  # fmt: skip
    again = transformers5.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(again(ids).logits, want, atol=CLOSE, rtol=0)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == text_parts.keys()
    assert all(torch.equal(each, text_parts[name]) for name, each in written.items())


def test_parameters_of_the_released_model_are_as_many_as_theirs(transformers5):
    from train_configs.inkling.recipes import inkling_2_mini

    kind = transformers5.AutoConfig.for_model("inkling2_loop_text")
    with torch.device("meta"):
        theirs = transformers5.AutoModelForCausalLM.from_config(kind)
    options = inkling_2_mini().model
    ours = build_decoder(options, max_seq_len=8, device="meta")
    counts = [sum(each.numel() for each in model.parameters()) for model in (ours, theirs)]
    assert counts == [26_068_156_416] * 2
    assert counts[0] - ours.config.idle_parameters() == 3_135_799_296
