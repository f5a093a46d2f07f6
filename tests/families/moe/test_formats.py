"""Mixtures as folders of transformers: every visit is a layer of its own, or one line says why."""

import json

import torch

from tests.families.moe.conftest import MakeMoE
from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of
from tests.support.llama_runs import VOCABULARY
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


def test_mixtral_has_no_place_for_biases(make_moe: MakeMoE, tmp_path, capsys):
    run = make_moe(router="softmax").run
    flags = ("--to", "mixtral-unrolled", "--output", tmp_path / "out", "--no-tokenizer")
    message = "layers.0.moe.expert_bias_SE is not zero, and Mixtral"
    assert message in error_of(capsys, "export", run, *flags)
    assert not [*tmp_path.iterdir()]
