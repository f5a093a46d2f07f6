"""Objectives: pure tensor functions first, thin loss classes after.

    LoopOutput.exit_logit_RBL ─ exit_distribution ─► p_r, H(p), KL(p ‖ π)
                                                       │ weights p_r / N
    LoopOutput.hidden_RBLD ─── LMHead (streamed) ◄─────┘
                                   └─► Σ_r p_r CE_r ─ expected_loss ─► loss, metrics

An objective sees a `LoopOutput` and the head, never a model.
"""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
