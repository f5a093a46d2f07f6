"""What makes two models the same model, so that one can continue from the other's checkpoint."""

from collections.abc import Mapping
from typing import Any

from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder


def architecture(config: LoopDecoder.Config) -> dict[str, Any]:
    """Return what makes a model the same model, by the names of `ModelOptions`."""
    attention = config.layers[0].attention
    return {
        "dim": config.dim,
        "n_layers": len(config.layers),
        "n_heads": attention.n_heads,
        "n_kv_heads": attention.n_kv_heads or attention.n_heads,
        "hidden_dim": config.layers[0].feed_forward.w1.out_features,
        "vocab_size": config.vocab_size,
        "exit_gate": config.exit_gate is not None,
        "tie_weights": config.enable_weight_tying,
        "rope_theta": attention.rope.theta,
    }


def check_architecture(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    holder: str = "the checkpoint",
    otherwise: str = "another dump_folder",
) -> None:
    """Raise `UserError` naming every difference between a checkpoint's model and this run's.

    Args:
        saved: The checkpoint's.
        wanted: What has to be in it, with these values.
        holder: What to call the checkpoint.
        otherwise: What to do instead of using its values.
    """
    differences = [
        f"model.{name}={wanted[name]} (checkpoint: {saved.get(name)})"
        for name in wanted
        if wanted[name] != saved.get(name)
    ]
    if differences:
        raise UserError(
            f"{holder} is of another architecture: {', '.join(differences)}; use its values, or "
            f"{otherwise}"
        )
