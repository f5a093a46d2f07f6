"""From a checkpoint to something that generates: the model, its text and what it was trained as.

    CHECKPOINT ─┬─ manifest.json: committed? ─► weights from DCP, of any world size
                └─ the run's config.json: model, context, source ─► tokenizer, checked by its hash

A run directory stands for its newest whole checkpoint. An imported run keeps its tokenizer beside
`config.json`, since it has no source.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.manifest import MANIFEST, read_manifest
from titan_loop.checkpoint.model import load_model
from titan_loop.data.load.mixture import parse_mixture
from titan_loop.data.source_card import CARD_NAME, SourceCard
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_NAME,
    TURN_END,
    check_vocabulary,
    load_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and what its run says about it.

    Attributes:
        model: In evaluation mode.
        checkpoint: The folder it came from.
        manifest: Its commit record, which outlives a deletion of the folder.
        recurrent_steps: R at the end of its training so far.
        run: The run's folder.
        source: A prepared source it was trained on; None for generated or imported data.
    """

    model: LoopDecoder
    checkpoint: Path
    manifest: dict[str, Any]
    recurrent_steps: int
    run: Path
    source: Path | None


def load_checkpoint(
    path: str | Path,
    *,
    context_tokens: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Loaded:
    """Load a committed checkpoint for generation on one device.

    Args:
        path: A checkpoint's folder, or a run's for its newest whole checkpoint.
        context_tokens: Tokens the rotary table covers; None for the trained window.
        device: Where the model goes.
        dtype: Of its weights; the exit gate stays in fp32.

    Raises:
        UserError: No committed checkpoint there, no run around it, or a context below 2.
    """
    checkpoint, run = find_checkpoint(Path(path))
    config = RunDirectory(run).read_config()
    manifest = read_manifest(checkpoint)
    context = config["training"]["seq_len"] if context_tokens is None else context_tokens
    if context < 2:
        raise UserError(f"context={context} must be at least 2, a prompt and one token")
    model = load_model(checkpoint, config["model"], max_seq_len=context)
    for name, child in model.named_children():
        child.to(device=device, dtype=None if name in ("exit_gate", "rope_table") else dtype)
    mixture = config["dataloader"].get("mixture")
    return Loaded(
        model=model,
        checkpoint=checkpoint,
        manifest=manifest,
        recurrent_steps=manifest["trainer"]["recurrent_steps"],
        run=run,
        source=Path(parse_mixture(mixture)[0].path) if mixture else None,
    )


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Return the folder of a committed checkpoint and that of its run.

    Args:
        path: Either of them; a run stands for its newest whole checkpoint.

    Raises:
        UserError: There is none, or no run around it.
    """
    if not path.is_dir():
        raise UserError(f"checkpoint {path} is not a folder; give a run or one of its checkpoints")
    if (path / "run.json").is_file():
        folder = path / RunDirectory(path).read_config()["checkpoint"]["folder"]
        found = newest_good(folder)
        if found is None:
            raise UserError(f"{folder} has no committed checkpoint; train first")
        return folder / f"step-{found[0]}", path
    read_manifest(path)  # a folder without one is not a checkpoint
    for parent in path.resolve().parents:
        if (parent / "config.json").is_file():
            return path, parent
    raise UserError(
        f"checkpoint {path} has a {MANIFEST}, but no folder above it has the run's config.json; "
        "give a checkpoint inside its run"
    )


def load_matching_tokenizer(loaded: Loaded, given: str | Path | None = None) -> "Tokenizer":
    """Load the tokenizer a model was trained with, or check that `given` is the same.

    Args:
        loaded: The model; its source, if still there, tells which tokenizer it was.
        given: A `tokenizer.json`; None takes the source's, or the one an import left in the run.

    Raises:
        UserError: There is none to take, or the one given is another one.
    """
    source = loaded.source
    card = None
    if source is not None and (source / CARD_NAME).is_file():
        card = SourceCard.read(source)
    own = loaded.run / TOKENIZER_NAME if card is None or source is None else source / TOKENIZER_NAME
    path = own if given is None else Path(given)
    if given is None and not path.is_file():
        seen = "a source" if source is None else f"the source {source}"
        raise UserError(
            f"{loaded.checkpoint}: found neither {seen} with a tokenizer nor {path}; "
            "give --tokenizer"
        )
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, loaded.model.config.vocab_size, str(path))
    if card is not None and hashlib.sha256(path.read_bytes()).hexdigest() != card.tokenizer_sha256:
        raise UserError(
            f"tokenizer {path} is not the one {loaded.checkpoint} was trained with; use {own}"
        )
    return tokenizer


class TextEnds(NamedTuple):
    """Ids of the tokens that end a text.

    Attributes:
        end_of_text: The token between documents; None if the tokenizer has none.
        turn_end: The token that ends a chat turn; None if the tokenizer has none.
    """

    end_of_text: int | None
    turn_end: int | None

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens at which generation stops."""
        return frozenset(token for token in self if token is not None)


def text_ends(loaded: Loaded, tokenizer: "Tokenizer") -> TextEnds:
    """Return the tokens that ended texts in a model's training data.

    An imported run recorded them; a prepared source's card has the id that `--eos-token` chose.
    Where neither is left, they are `<|endoftext|>` and `<|im_end|>`.

    Args:
        loaded: The model.
        tokenizer: From `load_matching_tokenizer`.
    """
    recorded = RunDirectory(loaded.run).read_config().get("text") or {}
    end_of_text = tokenizer.token_to_id(recorded.get("end_of_text") or END_OF_TEXT)
    if loaded.source is not None and (loaded.source / CARD_NAME).is_file():
        end_of_text = SourceCard.read(loaded.source).eos_id
    return TextEnds(end_of_text, tokenizer.token_to_id(recorded.get("turn_end") or TURN_END))
