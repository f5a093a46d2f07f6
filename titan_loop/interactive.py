"""A saved model in Python: load it, look inside, change what it computes, let it write.

    titan_loop.load(run, checkpoint or exported folder) ─► LoopModel
        ├─ states, run_with_cache    one forward pass over a text, opened up
        ├─ generate, bits_per_byte   the engine and the scorer of the command line
        └─ hooks                     functions at (step, layer, site), in all of these

Shapes: R recurrent steps, N looped layers, B texts, L tokens, D width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import titan_loop.compat as compat  # before any torchtitan module
import torch
from torch import Tensor

from titan_loop.checkpoint.remote import RemoteCheckpoints, fetch_if_needed
from titan_loop.errors import UserError, require_at_least
from titan_loop.evaluation.readings import policy_reading
from titan_loop.evaluation.token_scorer import TokenRequest, TokenScorer
from titan_loop.formats.importing import CONFIG, ModelFolder
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import parse_exit_policy
from titan_loop.inference.hooks import AFTER_LAYERS, Function, Hooks, NamedHook, hook_names
from titan_loop.inference.loading import (
    TextEnds,
    ends_of,
    load_checkpoint,
    load_matching_tokenizer,
    placed,
)
from titan_loop.inference.rows import text_requests
from titan_loop.inference.sampling import Sampling
from titan_loop.models.context import PREFIX
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import get_family
from titan_loop.models.output import LoopOutput
from titan_loop.objectives.exit_distribution import exit_pmf
from titan_loop.runs.recipe_folder import chosen_run
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.text.text_format import TextFormat
from titan_loop.text.tokenizer import encode_prompt, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Text = str | Tensor
"""A text, or token ids (B, L) of texts that are equally long."""


class States(NamedTuple):
    """One forward pass over texts, step by step.

    Attributes:
        tokens_BL: Token ids, with the token that begins a text where the model has one.
        resid_RNBLD: State after each looped layer, before any norm between steps.
        hidden_RBLD: State after each step as head and gate read it, so after the norm and a coda.
        logits_RBLV: Logits of the next token after each step.
        exit_pmf_RBL: Probability of exiting at each step, fp32; None without an exit gate.
    """

    tokens_BL: Tensor
    resid_RNBLD: Tensor
    hidden_RBLD: Tensor
    logits_RBLV: Tensor
    exit_pmf_RBL: Tensor | None


class LoopModel:
    """A model with its tokenizer.

    Attributes:
        model: The decoder, in evaluation mode; its parameters require gradients.
        recurrent_steps: R at the end of training, the default of every method.
        read_text: Reads the tokenizer, and how the model's data wrote texts and chats.
    """

    def __init__(
        self,
        model: LoopDecoder,
        recurrent_steps: int,
        read_text: Callable[[], "tuple[Tokenizer, TextFormat]"],
    ) -> None:
        self.model, self.recurrent_steps, self.read_text = model, recurrent_steps, read_text

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the model's data; raises `UserError` if it is not there."""
        return self._text[0]

    @cached_property
    def _text(self) -> "tuple[Tokenizer, TextEnds]":
        tokenizer, text = self.read_text()
        return tokenizer, ends_of(text, tokenizer)

    def tokens(self, text: Text) -> Tensor:
        """Return token ids (B, L) on the model's device; an empty text is its first token alone."""
        config = self.model.config
        if isinstance(text, str):
            tokenizer, ends = self._text
            ids = encode_prompt(tokenizer, text, ends.begin_of_text)
            text = torch.tensor([ids or [_before_text(ends)]])
        tokens_BL = text.view(1, -1) if text.ndim == 1 else text
        if tokens_BL.shape[1] > config.max_seq_len:
            raise UserError(
                f"text has {tokens_BL.shape[1]} tokens, the context is {config.max_seq_len}; "
                "shorten it, or load(…, context=N)"
            )
        if not 0 <= int(tokens_BL.min()) <= int(tokens_BL.max()) < config.vocab_size:
            raise UserError(f"text has ids outside the vocabulary of {config.vocab_size}")
        return tokens_BL.to(self.model.tok_embeddings.weight.device)

    def states(
        self, text: Text, *, recurrent_steps: int | None = None, gradient: bool = False
    ) -> States:
        """Return states, logits and exit probabilities of every step.

        Args:
            text: A text, or token ids (B, L).
            recurrent_steps: R; None takes the trained one.
            gradient: Whether the results have a gradient.
        """
        kept: dict[tuple[int | None, int | None], Tensor] = {}

        def keep(value: Tensor, hook: Any) -> None:
            kept[hook.step, hook.layer] = value

        with torch.set_grad_enabled(gradient):
            tokens_BL, output = self._forward(text, recurrent_steps, [(AFTER_LAYERS, keep)])
            exits = output.exit_logit_RBL
            steps, layers = range(1, len(output.hidden_RBLD) + 1), self.model.config.looped
            return States(
                tokens_BL,
                torch.stack([torch.stack([kept[s, n] for n in layers]) for s in steps]),
                torch.stack(output.hidden_RBLD),
                torch.stack([self.model.readout(read_BLD) for read_BLD in output.hidden_RBLD]),
                exit_pmf(torch.stack(exits)) if exits else None,
            )

    def run_with_cache(
        self,
        text: Text,
        names: str | Sequence[str] = "*",
        *,
        recurrent_steps: int | None = None,
        gradient: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits (B, L, V) after step R, and the values at sites by name.

        Args:
            names: Names or patterns of sites (`titan_loop/inference/hooks.py`); a site that is
                visited several times, such as a coda, has its last value.
            recurrent_steps: R; None takes the trained one.
            gradient: Whether the results have a gradient; values can then be asked for theirs.
        """
        cache: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Any) -> None:
            cache[hook.name] = value

        patterns = [names] if isinstance(names, str) else names
        with torch.set_grad_enabled(gradient):
            _, output = self._forward(text, recurrent_steps, [(name, keep) for name in patterns])
            return self.model.readout(output.hidden_RBLD[-1]), cache

    def hooks(self, hooks: Iterable[NamedHook]) -> Hooks:
        """Return a scope in which functions are called at sites, whatever the model does in it."""
        return Hooks(self.model, hooks)

    def hook_names(self, recurrent_steps: int | None = None) -> list[str]:
        """Return the names of all sites of R steps; None for the trained R."""
        return hook_names(self.model, self._steps(recurrent_steps))

    def generate(
        self,
        text: str,
        *,
        stream: bool = False,
        exit: str = "full",
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        recurrent_steps: int | None = None,
        kv_cache: str = "full",
        prefill_steps: int | None = None,
    ) -> Any:
        """Complete a text as `titan-loop generate` does, whose flags have the same meanings.

        Returns:
            A `Completion` (`titan_loop/inference/rows.py`): text, tokens and the step that each was
            read from. With `stream` an iterator of `GeneratedToken`s, each as soon as it is known.
        """
        get_family(self.model.config.family).require("generate")
        tokenizer, ends = self._text
        engine = Engine(
            self.model,
            recurrent_steps=self._steps(recurrent_steps),
            kv_cache=kv_cache,
            exit_policy=parse_exit_policy(exit),
            prefill_steps=prefill_steps,
        )
        requests = text_requests(
            tokenizer,
            [text or [_before_text(ends)]],
            stop_tokens=ends.stop_tokens,
            max_new_tokens=max_new_tokens,
            stop=stop,
            seeds=[seed],
            begin=ends.begin_of_text,
        )
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        if stream:
            return engine.stream(requests, sampling=sampling)
        return engine.complete(requests, sampling=sampling)[0]

    def bits_per_byte(
        self, text: str, *, exit: str = "full", recurrent_steps: int | None = None
    ) -> float:
        """Return −log₂ of the probability of a text, by the bytes of its UTF-8.

        The text is a document of its own: its first token is predicted from the one that begins
        texts, or ends them. A text longer than the context is scored in windows.

        Args:
            text: At least one character.
            exit: Exit policy by which every token is read.
            recurrent_steps: R; None takes the trained one.
        """
        get_family(self.model.config.family).require("held_out")
        if not text:
            raise UserError("text is empty: give at least one character")
        tokenizer, ends = self._text
        ids = encode_prompt(tokenizer, text, None)
        reading = policy_reading(exit, self._steps(recurrent_steps))
        before, context = _before_text(ends), self.model.config.max_seq_len
        scores = TokenScorer(self.model, [reading]).score(_windows([before, *ids], context))
        return sum(score.nats[0] for score in scores) / (math.log(2) * len(text.encode()))

    def _steps(self, recurrent_steps: int | None) -> int:
        require_at_least(1, recurrent_steps=recurrent_steps)
        return self.recurrent_steps if recurrent_steps is None else recurrent_steps

    def _forward(
        self, text: Text, recurrent_steps: int | None, hooks: Sequence[tuple[str, Function]]
    ) -> tuple[Tensor, LoopOutput]:
        config = self.model.config
        if missing := {*config.columns} - {PREFIX}:
            raise UserError(
                f"model.family={config.family} reads {', '.join(sorted(missing))} beside tokens, "
                "which a text does not have; call the decoder, `.model`, with columns"
            )
        tokens_BL, steps = self.tokens(text), self._steps(recurrent_steps)
        with Hooks(self.model, hooks):
            return tokens_BL, self.model(tokens_BL, recurrent_steps=steps)


def load(
    path: str | Path,
    *,
    remote: str | None = None,
    stage: str | None = None,
    context: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    ema: bool = False,
) -> LoopModel:
    """Load a model of a run, one of its checkpoints, a recipe, or a folder for other programs.

    Args:
        path: Run (its newest whole checkpoint is taken), step folder, folder of a recipe, or a
            folder that `titan-loop convert import` reads.
        remote: The run's `checkpoint.remote`, from which its newest checkpoint is fetched if no
            whole one is here.
        stage: Stage of a recipe; by default the newest.
        context: Longest text in tokens; by default the trained window.
        device: Device of the weights; by default a GPU if there is one.
        dtype: Type of the weights; the exit gate stays in fp32.
        ema: Whether to load the average of the weights that training kept.
    """
    path, device = Path(path), compat.device_type() if device is None else device
    if (path / CONFIG).is_file() and not RunDirectory(path).run_json.is_file():
        for name, value in {"remote": remote, "stage": stage, "ema": ema or None}.items():
            if value is not None:
                raise UserError(f"{name}={value} has no effect on {path}, which is no run")
        return _load_folder(path, context, device, dtype)
    run = chosen_run(path, stage)
    if remote is not None:
        directory = RunDirectory(run)
        name = directory.read_config().get("stage", "")
        with directory.lock():
            fetch_if_needed(RemoteCheckpoints(remote, stage=name, run=run, claim=False), run)
    loaded = load_checkpoint(run, context_tokens=context, device=device, dtype=dtype, ema=ema)

    def read_text() -> "tuple[Tokenizer, TextFormat]":
        tokenizer = load_matching_tokenizer(loaded)
        return tokenizer, loaded.run.text_format(tokenizer)

    return LoopModel(loaded.model, loaded.recurrent_steps, read_text)


def _load_folder(
    path: Path, context: int | None, device: str | torch.device, dtype: torch.dtype
) -> LoopModel:
    folder = ModelFolder(path)

    def read_text() -> "tuple[Tokenizer, TextFormat]":
        if folder.tokenizer is None or folder.text is None:
            raise UserError(f"{path} has no tokenizer.json; give token ids, or add the file")
        return load_tokenizer(folder.tokenizer), folder.text

    model = placed(folder.build(context), device=device, dtype=dtype)
    return LoopModel(model, folder.shape.recurrent_steps, read_text)


def _before_text(ends: TextEnds) -> int:
    """Return the token in front of a text: BOS, or else the end of the text before."""
    before = ends.end_of_text if ends.begin_of_text is None else ends.begin_of_text
    if before is None:
        raise UserError("the tokenizer has no token that begins or ends a text; give a longer text")
    return before


def _windows(tokens: Sequence[int], context: int) -> list[TokenRequest]:
    """Return requests that score every token but the first once, in windows of the context.

    The last window reaches back, so that its tokens see as many before them as fit.
    """
    requests = []
    for first in range(1, len(tokens), context):
        last = min(first + context, len(tokens))
        seen = first - 1 if first == 1 else last - 1 - context
        requests.append(TokenRequest((*tokens[seen:first],), (*tokens[first:last],)))
    return requests
