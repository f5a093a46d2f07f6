"""HRM-Text beside transformers' own: states at every cycle, logits, caches, masks, gradients."""

import textwrap
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.folders import opened
from tests.families.ouro.hugging_face.conftest import convert
from titan_loop.families.hrm_text.model import HrmTextOptions
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

pytestmark = pytest.mark.hf5

CLOSE = 1e-5  # fp32 sums in another order, of values of size 1
EXACT = 1e-6  # float64, but both tables of rotations are fp32
HIGH, LOW, LAYERS, LENGTH, VOCABULARY = 3, 2, 2, 20, 128
PARTS = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.gate": "self_attn.gate_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def their_name(name: str) -> str:
    """Return the name in transformers of one of our parameters."""
    outside = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "low_start.weight": "model.z_L_init",
    }
    if name in outside:
        return outside[name]
    _, index, part = name.removesuffix(".weight").split(".", 2)
    stack, layer = divmod(int(index), LAYERS)
    return f"model.{'LH'[stack]}_module.layers.{layer}.{PARTS[part]}.weight"


@pytest.fixture
def pair(transformers5: ModuleType) -> tuple[LoopDecoder, Any]:
    """Return our model and theirs, with the same random weights."""
    torch.manual_seed(4)
    ours = build_decoder(
        HrmTextOptions(n_layers=2 * LAYERS, recurrent_steps=HIGH, low_cycles=LOW), max_seq_len=64
    )
    config = transformers5.HrmTextConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=LAYERS,
        num_attention_heads=4, head_dim=16, H_cycles=HIGH, L_cycles=LOW,
        max_position_embeddings=64, embedding_scale=ours.config.embedding_scale,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    theirs = transformers5.HrmTextForCausalLM(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            nn.init.normal_(parameter, std=0.1)
    theirs.load_state_dict({their_name(name): value for name, value in ours.state_dict().items()})
    return ours.eval(), theirs.eval()


def cycles(theirs: Any, **inputs: Any) -> tuple[list[Tensor], Tensor]:
    """Return z_H after every high cycle, and the logits."""
    states: list[Tensor] = []
    hook = theirs.model.H_module.register_forward_hook(lambda *args: states.append(args[-1]))
    logits = theirs(**inputs).logits
    hook.remove()
    return states, logits


def tokens_of(rows: int) -> Tensor:
    """Return random tokens, (rows, LENGTH)."""
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("prefix", [None, 1, 7, LENGTH])
def test_states_and_logits_at_every_cycle(pair, prefix):
    ours, theirs = pair
    tokens, inputs, columns = tokens_of(2), {}, None
    if prefix is not None:
        column = (torch.arange(LENGTH) < prefix).expand(2, -1)
        inputs, columns = {"token_type_ids": column.long()}, {"prefix": column}
    states, logits = cycles(theirs, input_ids=tokens, **inputs)
    output = ours(tokens, columns=columns)
    assert len(output.hidden_RBLD) == len(states) == HIGH
    for mine, state in zip(output.hidden_RBLD, states, strict=True):
        torch.testing.assert_close(mine, state, atol=CLOSE, rtol=0)
    torch.testing.assert_close(ours.readout(output.hidden_RBLD[-1]), logits, atol=CLOSE, rtol=0)
    if prefix == 7:  # the mask changes something
        assert (ours(tokens).hidden_RBLD[-1] - states[-1]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("prefix_lm", [True, False])
def test_the_cache_continues_prompts_as_theirs(pair, prefix_lm):
    ours, theirs = pair
    ours.config.prefix_lm = prefix_lm
    prompts = [tokens_of(2)[0, :9].tolist(), tokens_of(2)[1, :4].tolist()]
    engine = Engine(ours)
    requests = [Request(prompt=prompt, max_new_tokens=12) for prompt in prompts]
    logits: list[Tensor] = []
    readout, engine.stack.readout = (
        engine.stack.readout,
        lambda x: logits.append(readout(x)) or logits[-1],
    )
    together = engine.complete(requests)
    for row, (prompt, completion) in enumerate(zip(prompts, together, strict=True)):
        ids = torch.tensor([prompt])
        kinds = torch.ones_like(ids) if prefix_lm else None
        out = theirs(input_ids=ids, token_type_ids=kinds, use_cache=True)
        for index, token in enumerate(completion.tokens):
            torch.testing.assert_close(logits[index][row], out.logits[0, -1:], atol=CLOSE, rtol=0)
            assert token == int(out.logits[0, -1].argmax())
            out = theirs(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
    assert ours.cache_slots(HIGH)[0] * ours.cache_slots(HIGH)[1] == theirs.config.num_hidden_layers


@pytest.mark.parametrize(
    ("k", "low"), [(4, [0, 0, 1]), (5, [0, 0, 2]), (6, [0, 1, 2]), (9, [2] * 3)]
)
def test_gradients_of_the_last_k_passes(pair, k, low):
    ours, theirs = (model.double() for model in pair)
    theirs.model.L_bp_cycles_padded = low  # their high passes all have a gradient: k > HIGH
    tokens = tokens_of(2)
    weight = torch.randn(2, LENGTH, VOCABULARY, dtype=torch.float64)
    (theirs(input_ids=tokens).logits * weight).sum().backward()
    (ours.readout(ours(tokens, backward_steps=k).hidden_RBLD[-1]) * weight).sum().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        want = wanted[their_name(name)].grad
        if name == "low_start.weight":
            assert parameter.grad is None
            continue
        torch.testing.assert_close(
            parameter.grad, want, atol=EXACT * float(want.abs().max()), rtol=0
        )


@torch.no_grad()
def test_a_folder_that_transformers_made_is_imported(transformers5, tmp_path):
    torch.manual_seed(0)
    config = transformers5.HrmTextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, head_dim=16, H_cycles=2, L_cycles=3,
    )  # fmt: skip
    theirs = transformers5.HrmTextForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "made")
    convert("import", tmp_path / "made", "--output", tmp_path / "run")
    ours = opened(tmp_path / "run")
    tokens = tokens_of(1)[:, :12]
    logits = ours.readout(ours(tokens).hidden_RBLD[-1])
    torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_example_on_the_card_reads_a_prefix(
    transformers5, make_run, tmp_path, ascii_tokenizer, monkeypatch, capsys
):
    made = make_run(prefix_lm=True)
    flags = ("--to", "hrm_text", "--tokenizer", ascii_tokenizer)
    convert("export", made.run, "--output", tmp_path / "out", *flags)
    card = (tmp_path / "out" / "README.md").read_text()
    code = card.partition("## Use")[2].partition("## Lineage")[0]
    lines = [line for line in code.splitlines() if line.startswith("    ")]
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(textwrap.dedent("\n".join(lines)), names)
    prompt, answer = (names[name] for name in ("prompt", "answer"))
    assert prompt["token_type_ids"].all()
    length = prompt["input_ids"].shape[1]
    request = Request(prompt=prompt["input_ids"][0].tolist(), max_new_tokens=32)
    (ours,) = Engine(made.model).complete([request])
    assert answer[0, length:].tolist() == ours.tokens
    capsys.readouterr()
