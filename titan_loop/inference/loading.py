"""From a checkpoint to something that generates: the model and its tokenizer."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from titan_loop.checkpoint.model import load_model
from titan_loop.errors import UserError
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import Use, get_family
from titan_loop.runs.saved_run import SavedRun
from titan_loop.text.text_format import TextFormat
from titan_loop.text.tokenizer import TURN_END, check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model, the manifest of its checkpoint, and its run."""

    model: LoopDecoder
    checkpoint: Path
    manifest: dict[str, Any]
    recurrent_steps: int
    run: SavedRun
    ema: bool = False


def load_checkpoint(
    path: str | Path,
    *,
    use: Use | None = None,
    context_tokens: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    ema: bool = False,
) -> Loaded:
    """Load a committed checkpoint for generation or scoring on one device.

    Args:
        path: A checkpoint, or a run (its newest whole checkpoint is taken).
        use: Purpose that the family must support; `UserError` if it does not.
        context_tokens: Tokens that the rotary table covers; None for the trained window.
        dtype: Type of the weights; the exit gate and tables of positions stay in fp32.
    """
    run = SavedRun.open(path)
    options = run.model_options
    if use is not None:
        get_family(options.family).require(use)
    checkpoint = run.checkpoint()
    context = run.seq_len if context_tokens is None else context_tokens
    if context < 2:
        raise UserError(f"context={context} must be at least 2, a prompt and one token")
    if context > run.seq_len + 1:  # a window and the token after it
        logger.warning(
            f"{run.path}: the context of {context} tokens is longer than the trained window of "
            f"{run.seq_len}, beyond which nothing was trained"
        )
    model = load_model(checkpoint.path, options, max_seq_len=context, ema=ema)
    return Loaded(
        model=placed(model, device=device, dtype=dtype),
        checkpoint=checkpoint.path,
        manifest=checkpoint.manifest,
        recurrent_steps=checkpoint.recurrent_steps,
        run=run,
        ema=ema,
    )


def placed(model: LoopDecoder, *, device: str | torch.device, dtype: torch.dtype) -> LoopDecoder:
    """Move a model to a device and type; the exit gate and tables of positions stay in fp32."""
    for name, child in model.named_children():
        child.to(device=device, dtype=None if name in ("exit_gate", "positions") else dtype)
    return model


def load_matching_tokenizer(loaded: Loaded, given: str | Path | None = None) -> "Tokenizer":
    """Load the tokenizer a model was trained with; raise `UserError` if `given` is another one."""
    path = loaded.run.tokenizer(given).path
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, loaded.model.config.vocab_size, str(path))
    return tokenizer


class TextEnds(NamedTuple):
    """Ids of the tokens that end a text and a chat turn, and that begin a text; None for none.

    `others` are further ones at which generation stops.
    """

    end_of_text: int | None
    turn_end: int | None
    begin_of_text: int | None
    others: frozenset[int] = frozenset()

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens at which generation stops."""
        ends = (self.end_of_text, self.turn_end)
        return self.others.union(token for token in ends if token is not None)


def text_ends(loaded: Loaded, tokenizer: "Tokenizer") -> TextEnds:
    """Return the tokens that ended and began texts in a model's training data.

    They come from an imported run's record or a prepared source's card; without either, they are
    `<|endoftext|>` and `<|im_end|>`, and nothing begins a text.
    """
    return ends_of(loaded.run.text_format(tokenizer), tokenizer)


def ends_of(text: TextFormat, tokenizer: "Tokenizer") -> TextEnds:
    """Return the tokens that end and begin texts of a format."""
    others = (tokenizer.token_to_id(token) for token in text.end_tokens)
    return TextEnds(
        tokenizer.token_to_id(text.end_of_text),
        tokenizer.token_to_id(text.turn_end or TURN_END),
        None if text.begin_of_text is None else tokenizer.token_to_id(text.begin_of_text),
        frozenset(token for token in others if token is not None),
    )
