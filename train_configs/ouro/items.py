"""Multiple-choice items, answered after every recurrent step, and the states behind the answers.

items ─► prompt + choice ─► one pass to the deepest step ─► nats of every choice after each step
     └─► prompt alone ────► states of its last token after every layer of every step
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from titan_loop.analysis.steps.layer_states import at_layer_visits
from titan_loop.errors import UserError, nearest, require_at_least
from titan_loop.evaluation.offline_tasks import OFFLINE_TASKS
from titan_loop.evaluation.readings import depth_readings
from titan_loop.evaluation.token_scorer import TokenRequest, TokenScorer
from titan_loop.inference.loading import Loaded, load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.models.decoder import LoopDecoder
from titan_loop.storage.json_files import read_jsonl
from titan_loop.text.tokenizer import encode_prompt

ITEMS = "mmlu_dev"
"""Default items of the analyses."""


@dataclass(frozen=True)
class Item:
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
    """Return the items of an offline task, or of a JSONL file.

    Args:
        name: `mmlu_dev`, `multi_hop`, `mano`, or a file whose lines are objects with `text`,
            `choices` (a list of strings) and, optionally, `answer` (an index).
        limit: Number of items to use, from the first; None for all.

    Raises:
        UserError: There is no such task or file, it has no items, a line is not an item, or items
            differ in their number of choices.
    """
    path = Path(name)
    if name in OFFLINE_TASKS:
        items = [_item(record, name) for record in OFFLINE_TASKS[name]()]
    elif path.is_file():
        records = read_jsonl(path, {"text": str, "choices": list})
        items = [_item(record, f"{path} line {n}") for n, record in enumerate(records, start=1)]
    else:
        raise UserError(
            f"items={name} is neither a file nor a task{nearest(name, OFFLINE_TASKS)}; give a "
            "JSONL file with text and choices"
        )
    items = items[:limit]
    if not items:
        raise UserError(f"items={name} has no items")
    if len({len(item.choices) for item in items}) > 1:
        raise UserError(f"items={name} mixes numbers of choices; give all items the same number")
    return items


def _item(record: dict[str, Any], where: str) -> Item:
    choices, answer = tuple(record["choices"]), record.get("answer")
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise UserError(f"{where}: choices={choices!r} must be at least two strings")
    if answer is not None and (type(answer) is not int or not 0 <= answer < len(choices)):
        raise UserError(f"{where}: answer={answer!r} must be an index below {len(choices)}")
    return Item(record["text"], choices, answer)


def nats_of_choices(
    model: LoopDecoder,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    depths: Sequence[int],
    *,
    batch_rows: int = 8,
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
    scorer = TokenScorer(model, depth_readings(depths), batch_rows=batch_rows)
    nats = np.array([score.nats for score in scorer.score(requests)])
    return nats.reshape(len(items), len(items[0].choices), len(depths)).transpose(0, 2, 1)


@torch.no_grad()
def last_token_states(
    model: LoopDecoder, prompts: Sequence[Sequence[int]], steps: int, *, batch_rows: int = 8
) -> np.ndarray:
    """Return the last token's state after every looped layer of every step.

    Args:
        prompts: Token ids, at least one each.
        steps: R.

    Returns:
        float32, shape (prompts, R, layers, D): every layer's output, before any norm between steps.
    """
    device = model.tok_embeddings.weight.device
    room = model.config.max_seq_len
    collected: list[np.ndarray] = []
    for start in range(0, len(prompts), batch_rows):
        batch = [list(prompt)[-room:] for prompt in prompts[start : start + batch_rows]]
        longest = max(map(len, batch))
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in batch]
        last = torch.tensor([len(prompt) - 1 for prompt in batch], device=device)
        states = _states_at(model, torch.tensor(padded, device=device), last, steps)
        shape = (len(batch), steps, len(model.looped_layers()), states.shape[-1])
        collected.append(states.view(shape).cpu().numpy())
    return np.concatenate(collected)


def _states_at(
    model: LoopDecoder, tokens: torch.Tensor, position: torch.Tensor, steps: int
) -> torch.Tensor:
    """Return one position's state at every visit, in the order of steps, then layers."""
    rows = torch.arange(len(tokens), device=tokens.device)
    visits: list[torch.Tensor] = []

    def keep(step: int, layer: int, state: torch.Tensor) -> None:
        visits.append(state[rows, position].float())

    with at_layer_visits(model, keep):
        model(tokens, recurrent_steps=steps, collect="last")
    return torch.stack(visits, dim=1)


def open_items(run: Path, items: str, limit: int | None) -> tuple[Loaded, list[Item]]:
    """Return a run's checkpoint and the items to ask; raises `UserError` as `read_items`."""
    require_at_least(1, limit=limit)
    chosen = read_items(items, limit)
    return load_checkpoint(run, use="analyse"), chosen


def item_nats(loaded: Loaded, items: Sequence[Item], depths: Sequence[int]) -> np.ndarray:
    """Return `nats_of_choices` with the tokenizer of the checkpoint."""
    tokenizer = load_matching_tokenizer(loaded)
    begin = text_ends(loaded, tokenizer).begin_of_text
    return nats_of_choices(loaded.model, tokenizer, items, depths, begin=begin)


def item_states(loaded: Loaded, items: Sequence[Item], steps: int) -> np.ndarray:
    """Return `last_token_states` of the items' prompts."""
    tokenizer = load_matching_tokenizer(loaded)
    begin = text_ends(loaded, tokenizer).begin_of_text
    prompts = [encode_prompt(tokenizer, item.text, begin) for item in items]
    return last_token_states(loaded.model, prompts, steps)
