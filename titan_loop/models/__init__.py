"""The computation on one device; placements are declared here and applied in `distributed/`.

    tokens ─ tok_embeddings ─► h_0
    h_{r-1} ─ layers (each once) ─ norm ─► h_r          `LoopDecoder.step`
    h_r ─ read ─► input of head and gate (h_r itself for Ouro, which applies its norm in every step)
    h_r ─ advance ─► start of step r+1 (h_r itself for Ouro)
    h_r ─ exit_gate ─► exit logit of step r (fp32)       `LoopDecoder.gate`
    h_r ─ lm_head   ─► logits, or the streamed loss      `LoopDecoder.readout`

Shape suffixes: B batch, L sequence, D width, V vocabulary, N heads, H head dim, F feed-forward
width, R recurrent steps.
"""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
