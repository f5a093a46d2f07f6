"""Sizes of a mixture for a scaling law, counted by hand from the parameters of the built model."""

from titan_loop.analysis.scaling.law import model_sizes
from titan_loop.families.moe.model import MoEOptions
from titan_loop.models.family import build_decoder, decoder_config


def test_idle_experts_are_stored_and_not_active():
    options = MoEOptions(size="debugmodel", experts=4, top_k=1, prelude_layers=1)
    size = model_sizes(decoder_config(options, max_seq_len=8))
    model = build_decoder(options, max_seq_len=8)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    body = {n: c for n, c in counts.items() if not n.startswith(("tok_embeddings.", "lm_head."))}
    routed = {name: count for name, count in body.items() if ".inner_experts." in name}
    looped = {name for name in body if not name.startswith("layers.0.")}
    assert size["parameters"] == sum(body.values()) - sum(routed.values()) * 3 // 4
    assert size["looped"] == sum(
        count // 4 if name in routed else count for name, count in body.items() if name in looped
    )
