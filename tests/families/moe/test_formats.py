"""Mixtures as folders of transformers: every visit is a layer of its own, or one line says why."""

import json

import pytest
import torch

from tests.families.moe.conftest import MakeMoE
from tests.families.nanbeige.conftest import VOCABULARY
from tests.families.nanbeige.test_formats import convert
from tests.families.ouro.hugging_face.test_export import error_of
from titan_loop.checkpoint.safetensors_files import SafetensorsFolder
from titan_loop.families.moe.model import MoEOptions
from titan_loop.models.family import build_decoder

SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1, "routers": 2, "attentions": 3}
STEPS, VISITS = 3, 8
OURS = {  # tensors of a layer with experts → the folder's, of each expert where there is {}
    "moe.router.gate.weight": "mlp.gate.weight",
    "moe.expert_bias_SE": "mlp.gate.e_score_correction_bias",
    "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.{}.gate_proj.weight",
    "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.{}.down_proj.weight",
    "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.{}.up_proj.weight",
    "moe.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "moe.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention.qkv_linear.wq.weight": "self_attn.q_proj.weight",
    "attention.qkv_linear.wk.weight": "self_attn.k_proj.weight",
    "attention.qkv_linear.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


def test_every_visit_is_a_layer_with_router_and_attention_of_its_step(make_moe: MakeMoE, tmp_path):
    made = make_moe(**SPLIT, dense_layers=(1,))
    out = tmp_path / "out"
    shards = ("--max-shard-gigabytes", "1e-4", "--no-tokenizer")
    flags = ("--output", out, "--recurrent-steps", STEPS, *shards)
    convert("export", made.run, "--to", "glm4_moe-unrolled", *flags)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (VISITS, 1)
    files = SafetensorsFolder(out)
    sparse = MoEOptions(
        vocab_size=VOCABULARY,
        n_layers=VISITS,
        recurrent_steps=1,
        experts=4,
        expert_hidden_dim=32,
        shared_experts=1,  # of zeros
        dense_layers=(1,),
    )
    model = build_decoder(sparse, max_seq_len=64).eval()
    state = {
        "tok_embeddings.weight": files.read("model.embed_tokens.weight"),
        "norm.weight": files.read("model.norm.weight"),
        "lm_head.weight": files.read("lm_head.weight"),
    }
    for name in model.state_dict().keys() - state.keys():
        _, layer, inner = name.split(".", 2)
        theirs = f"model.layers.{layer}.{OURS[inner]}"
        parts = [files.read(theirs.format(e)) for e in range(4 if "{}" in theirs else 1)]
        state[name] = torch.stack(parts) if "{}" in theirs or "_SE" in name else parts[0]
    model.load_state_dict(state)
    tokens = torch.arange(40)[None] * 7 % VOCABULARY
    with torch.no_grad():
        want = made.model(tokens, recurrent_steps=STEPS).hidden_RBLD[-1]
        assert torch.equal(model(tokens).hidden_RBLD[-1], want)
    assert not state["layers.1.moe.shared_experts.w2.weight"].any()


def exported(make_moe: MakeMoE, tmp_path, to: str, **options: object):
    """Return the model, and config and tensors of a folder of two steps."""
    made = make_moe(router="softmax", **options)
    flags = ("--output", tmp_path / "out", "--recurrent-steps", 2, "--no-tokenizer")
    convert("export", made.run, "--to", f"{to}-unrolled", *flags)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    return made.model.state_dict(), config, SafetensorsFolder(tmp_path / "out")


def test_an_ernie_has_a_row_of_biases_and_neighbours_in_its_heads(make_moe: MakeMoE, tmp_path):
    state, config, files = exported(
        make_moe,
        tmp_path,
        "ernie4_5_moe",
        n_layers=4,
        prelude_layers=1,
        coda_layers=1,
        routers=2,
        dense_layers=(1, 4),
        shared_experts=1,
    )
    assert config["architectures"] == ["Ernie4_5_MoeForCausalLM"]
    # Layers 1 | 2 3 2 3 | 4, of which the first and the last are dense.
    assert config["num_hidden_layers"] == 6
    assert (config["moe_layer_start_index"], config["moe_layer_end_index"]) == (1, 4)
    assert (config["moe_num_experts"], config["moe_k"]) == (4, 2)
    assert (config["moe_layer_interval"], config["moe_num_shared_experts"]) == (1, 1)
    for visit, layer, router in ((1, 1, 0), (2, 2, 0), (3, 1, 1), (4, 2, 1)):
        ours, theirs = f"layers.{layer}.moe.", f"model.layers.{visit}.mlp."
        bias = files.read(f"{theirs}moe_statics.e_score_correction_bias")
        assert torch.equal(bias, state[f"{ours}expert_bias_SE"][router : router + 1])
        name = "later_routers.0" if router else "router"
        gate = files.read(f"{theirs}gate.weight")
        assert torch.equal(gate, state[f"{ours}{name}.gate.weight"])
        down = files.read(f"{theirs}experts.3.down_proj.weight")
        assert torch.equal(down, state[f"{ours}routed_experts.inner_experts.w2_EDF"][3])
        up = files.read(f"{theirs}shared_experts.up_proj.weight")
        assert torch.equal(up, state[f"{ours}shared_experts.w3.weight"])
        query = state[f"layers.{layer}.attention.qkv_linear.wq.weight"].unflatten(0, (4, 2, 8))
        want = query.transpose(1, 2).flatten(0, 2)
        assert torch.equal(files.read(f"model.layers.{visit}.self_attn.q_proj.weight"), want)


def test_a_mixtral_has_experts_alone(make_moe: MakeMoE, tmp_path):
    state, config, files = exported(make_moe, tmp_path, "mixtral", bias=0.0, n_layers=2, top_k=3)
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_hidden_layers"], config["num_local_experts"]) == (4, 4)
    assert (config["num_experts_per_tok"], config["intermediate_size"]) == (3, 32)
    for visit in range(4):
        for letter, stack in (("w1", "w1_EFD"), ("w2", "w2_EDF"), ("w3", "w3_EFD")):
            name = f"layers.{visit % 2}.moe.routed_experts.inner_experts.{stack}"
            got = files.read(f"model.layers.{visit}.block_sparse_moe.experts.2.{letter}.weight")
            assert torch.equal(got, state[name][2])


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("mixtral", {"router": "softmax"}, "layers.0.moe.expert_bias_SE is not zero, and Mixtral"),
        (
            "ernie4_5_moe",
            {"router": "softmax", "score_scale": 2.0},
            "model.score_scale=2.0: the Ernie 4.5 MoE format supports only model.score_scale=1.0",
        ),
        (
            "glm4_moe",
            {"dense_layers": (2,)},
            "model.dense_layers=[2]: GLM-4 MoE allows only leading layers of the 6 unrolled ones",
        ),
        (
            "ernie4_5_moe",
            {"router": "softmax", "dense_layers": (1,)},
            "Ernie 4.5 MoE allows only leading and trailing layers of the",
        ),
        (
            "glm4_moe",
            {"norm_placement": "every_step"},
            "model.norm_placement=every_step: GLM-4 MoE has no norm between the steps",
        ),
    ],
)
def test_mixtures_that_a_format_cannot_hold_are_one_line(
    make_moe: MakeMoE, tmp_path, capsys, to, options, message
):
    run = make_moe(**options).run
    flags = ("--to", f"{to}-unrolled", "--output", tmp_path / "out", "--no-tokenizer")
    assert message in error_of(capsys, "export", run, *flags)
    assert not [*tmp_path.iterdir()]
