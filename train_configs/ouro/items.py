"""Multiple-choice items, answered after every recurrent step, and the states behind the answers.

items ─► prompt + choice ─► one pass to the deepest step ─► nats of every choice after each step
     └─► prompt alone ────► states of its last token after every layer of every step
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from titan_loop.errors import UserError, nearest, require_at_least
from titan_loop.evaluation.offline_tasks import OFFLINE_TASKS
from titan_loop.evaluation.readings import depth_readings
from titan_loop.evaluation.token_scorer import TokenRequest, TokenScorer
from titan_loop.inference.hooks import AFTER_LAYERS, Hooks
from titan_loop.inference.loading import Loaded, load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.models.decoder import LoopDecoder
from titan_loop.storage.json_files import read_jsonl
from titan_loop.text.tokenizer import encode_prompt

_BATCH_ROWS = 8


class Item(NamedTuple):
    """One question.

    Attributes:
        text: Prompt; a space and a choice follow it.
        choices: At least two possible answers.
        answer: Index of the right choice; None if it is unknown.
    """

    text: str
    choices: tuple[str, ...]
    answer: int | None = None


def read_items(name: str, limit: int | None = None) -> list[Item]:
    """Return the first items of an offline task, or of a JSONL file with text, choices, answer.

    Raises `UserError` if there is no such task or file, it has no items, a line is not an item, or
    items differ in their number of choices.
    """
    require_at_least(1, limit=limit)
    if name in OFFLINE_TASKS:
        records = [dict(record) for record in OFFLINE_TASKS[name]()]
    elif Path(name).is_file():
        records = [*read_jsonl(Path(name), {"text": str, "choices": list})]
    else:
        raise UserError(
            f"items={name} is neither a file nor a task{nearest(name, OFFLINE_TASKS)}; give a "
            "JSONL file with text and choices"
        )
    items = [_item(record, f"{name} line {n}") for n, record in enumerate(records[:limit], start=1)]
    if len({len(item.choices) for item in items}) != 1:
        raise UserError(f"items={name} needs items, all with the same number of choices")
    return items


def _item(record: dict[str, Any], where: str) -> Item:
    choices, answer = tuple(record["choices"]), record.get("answer")
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise UserError(f"{where}: choices={choices!r} must be at least two strings")
    if answer is not None and (type(answer) is not int or not 0 <= answer < len(choices)):
        raise UserError(f"{where}: answer={answer!r} must be an index below {len(choices)}")
    return Item(record["text"], choices, answer)


class Asked(NamedTuple):
    """A checkpoint, the tokenizer that it was trained with, and the items that it is asked."""

    loaded: Loaded
    tokenizer: Tokenizer
    begin: int | None
    items: list[Item]

    @classmethod
    def of(cls, run: Path, items: str, limit: int | None) -> "Asked":
        """Return a run's checkpoint and the items to ask; raises `UserError` as `read_items`."""
        chosen = read_items(items, limit)
        loaded = load_checkpoint(run, use="analyse")
        tokenizer = load_matching_tokenizer(loaded)
        return cls(loaded, tokenizer, text_ends(loaded, tokenizer).begin_of_text, chosen)

    def answers(self, depths: Sequence[int]) -> np.ndarray:
        """Return the index of every item's likeliest choice after every depth, (items, depths)."""
        found = nats_of_choices(
            self.loaded.model, self.tokenizer, self.items, depths, begin=self.begin
        )
        return found.argmin(axis=-1)

    def states(self, steps: int) -> np.ndarray:
        """Return `last_token_states` of the items' prompts."""
        prompts = [encode_prompt(self.tokenizer, item.text, self.begin) for item in self.items]
        return last_token_states(self.loaded.model, prompts, steps)


def nats_of_choices(
    model: LoopDecoder,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    depths: Sequence[int],
    *,
    begin: int | None = None,
) -> np.ndarray:
    """Return the negative log likelihood of every choice after every depth.

    Args:
        items: Items with the same number of choices; a prompt that is too long loses its beginning.
        depths: Recurrent steps to read, all from one pass.
        begin: Token in front of every prompt; None for none.

    Returns:
        float64, shape (items, depths, choices), summed over the tokens of a choice.
    """
    requests = []
    for item in items:
        for choice in item.choices:
            continuation = tokenizer.encode(f" {choice}", add_special_tokens=False).ids
            room = model.config.max_seq_len + 1 - len(continuation)
            context = encode_prompt(tokenizer, item.text, begin)[-room:]
            requests.append(TokenRequest(tuple(context), tuple(continuation)))
    scorer = TokenScorer(model, depth_readings(depths), batch_rows=_BATCH_ROWS)
    nats = np.array([score.nats for score in scorer.score(requests)])
    return nats.reshape(len(items), len(items[0].choices), len(depths)).transpose(0, 2, 1)


@torch.no_grad()
def last_token_states(
    model: LoopDecoder, prompts: Sequence[Sequence[int]], steps: int
) -> np.ndarray:
    """Return the last token's state after every looped layer of every step.

    Returns:
        float32, shape (prompts, R, layers, D): every layer's output, before any norm between steps.
    """
    device = model.tok_embeddings.weight.device
    collected: list[torch.Tensor] = []
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)[-model.config.max_seq_len :]], device=device)
        visits: list[torch.Tensor] = []
        with Hooks(model, [(AFTER_LAYERS, lambda x, _, to=visits: to.append(x[0, -1].float()))]):
            model(tokens, recurrent_steps=steps, collect="last")
        collected.append(torch.stack(visits).unflatten(0, (steps, -1)).cpu())
    return torch.stack(collected).numpy()
