"""Every strategy keeps the entries of the table in the module's docstring, row by row."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from titan_loop.inference.cache import (
    STRATEGIES,
    CacheShape,
    LoopCache,
    Pair,
    Places,
    TokenVisit,
    cache_strategy,
)
from titan_loop.models.context import CacheSlot, Entries

SHAPE = CacheShape(steps=3, layers=2, outside=1, rows=4, capacity=6, heads=2, head_dim=3)
OUTSIDE = 9  # stands for a layer outside the loop


def entry(row: int, position: int, step: int, layer: int) -> Tensor:
    """Return keys and values of one visit, (2, N, H); no two visits have the same."""
    part = torch.arange(2 * SHAPE.heads * SHAPE.head_dim, dtype=torch.float64) / 100
    return (part + 1000 * row + 100 * position + 10 * step + layer).view(2, 2, 3)


def pair(rows: Sequence[int], positions: Tensor, steps: Sequence[int], layer: int) -> Pair:
    """Return the entries of tokens at (B, L) positions, (B, L, N, H) each."""
    both = [
        torch.stack([entry(row, int(at), step, layer) for at in places])
        for row, places, step in zip(rows, positions, steps, strict=True)
    ]
    keys, values = torch.stack(both).unbind(2)
    return keys, values


def kept(strategy: str, row: int, position: int, last: int, step: int, layer: int) -> Tensor:
    """Return the key that later tokens see at `step` for a token that left after step `last`."""
    if strategy == "averaged":
        return torch.stack([entry(row, position, r, layer) for r in range(1, last + 1)]).mean(0)
    seen = {"full": min(step, last), "last": last, "first": 1}[strategy]
    return entry(row, position, seen, layer)


def seen_of(part: Tensor | Entries, row: int) -> Tensor:
    """Return keys or values of one row, (S, N, H); two heads of queries see those of each N."""
    if isinstance(part, Tensor):
        return part[row]
    heads = part.seen_MT.col_indices().view(len(part.seen_MT), -1).unflatten(0, (-1, 4))[row]
    assert torch.equal(heads[::2], heads[1::2])
    return part.table_TH[heads[::2]].movedim(0, 1)


@pytest.mark.parametrize(
    ("strategy", "queries"), [*((name, None) for name in STRATEGIES), ("full", 4), ("averaged", 4)]
)
def test_tokens_see_what_the_strategy_keeps_of_earlier_ones(strategy: str, queries: int | None):
    """Prompts of different lengths, rows at different steps, early exits, and new rows."""
    cache = cache_strategy(strategy)(SHAPE, dtype=torch.float64, device=torch.device("cpu"))
    left: dict[tuple[int, int], int] = {}  # row and position → last step
    rows: list[int] = []

    def prompts(names: list[int], length: int, steps: int) -> None:
        visit = cache.admit([length] * len(names))
        positions = torch.arange(length).expand(len(names), -1)
        for layer in range(SHAPE.layers):
            for step in range(1, steps + 1):
                new = pair(names, positions, [step] * len(names), layer)
                got = visit.update(CacheSlot(step, layer), *new)
                assert all(torch.equal(a, b) for a, b in zip(got, new, strict=True))
        visit.update(CacheSlot(None, 0), *pair(names, positions, [1] * len(names), OUTSIDE))
        cache.leave_prompt(len(rows), length, steps)
        rows.extend(names)
        left.update({(name, at): steps for name in names for at in range(length)})

    def tokens(positions: list[int], steps: list[int]) -> None:
        """Run one step of every row, and compare all keys and values that it may attend to."""
        at_B1 = torch.tensor(positions).unsqueeze(1)
        visit = TokenVisit(cache, Places.of(at_B1, queries=queries))
        same = len({*steps}) == 1
        step = steps[0] if same else torch.tensor(steps)
        for slot, layer in [*((CacheSlot(step, n), n) for n in (0, 1)), (CacheSlot(None, 0), 9)]:
            looped = slot.step is not None
            ran = steps if looped else [1] * len(rows)
            keys, values = visit.update(slot, *pair(rows, at_B1, ran, layer))
            apart = min(positions) < max(positions)
            if looped and not cache.is_shared:
                apart |= not same
            assert isinstance(keys, Entries) == bool(queries and apart)
            for index, (row, own) in enumerate(zip(rows, positions, strict=True)):
                seen = torch.stack([seen_of(part, index) for part in (keys, values)], dim=1)
                assert len(seen) == max(positions) + 1
                for at in range(own):
                    last = left[row, at] if looped else 1
                    want = kept(strategy, row, at, last, ran[index], layer)
                    torch.testing.assert_close(seen[at], want, rtol=1e-12, atol=1e-12)
                assert torch.equal(seen[own], entry(row, own, ran[index], layer))

    def leave(index: list[int], positions: list[int], steps: list[int]) -> None:
        cache.leave(torch.tensor(index), torch.tensor(positions), torch.tensor(steps))
        for place, at, step in zip(index, positions, steps, strict=True):
            left[rows[place], at] = step

    prompts([0, 1], 2, steps=2)  # a shortened prompt
    prompts([2], 3, steps=3)
    tokens([2, 2, 3], [1, 1, 1])
    leave([0], [2], [1])
    tokens([3, 2, 3], [1, 2, 2])  # row 0 has begun its next token
    leave([2], [3], [2])
    tokens([3, 2, 4], [2, 3, 1])
    leave([0, 1], [3, 2], [2, 3])
    tokens([4, 3, 4], [1, 1, 2])
    cache.select([2, 1])
    rows[:] = [2, 1]
    tokens([4, 3], [3, 2])
    leave([1, 0], [3, 4], [2, 3])
    tokens([5, 4], [1, 1])
    leave([1], [4], [1])
    tokens([5, 5], [2, 2])
    cache.select([0])
    rows[:] = [2]
    tokens([5], [3])
    prompts([3], 1, steps=3)  # in the place of a row that ended
    tokens([5, 1], [3, 1])


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    # Keys and values of 4 rows, 2 layers and 6 tokens; the layer outside has one more cache.
    [
        ("full", 2 * 4 * 6 * (3 * 2 + 1)),
        ("last", 2 * 4 * 6 * (2 + 1)),
        ("first", 2 * 4 * (6 * (2 + 1) + 2)),
        ("averaged", 2 * 4 * (6 * (2 + 1) + 2)),
    ],
)
def test_a_cache_has_the_bytes_of_its_table(strategy: str, numbers: int):
    cache = cache_strategy(strategy)(SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.allocated_bytes == 4 * numbers * SHAPE.heads * SHAPE.head_dim
    alone: LoopCache = cache_strategy(strategy)(
        SHAPE._replace(outside=0), dtype=torch.float32, device=torch.device("cpu")
    )
    assert alone.outside is None
    alone.admit([1])
    alone.select([])
    assert alone.rows == 0


def test_a_full_cache_keeps_the_inputs_of_convolutions():
    """A token's input at a step it skipped is the one of the last step that it ran."""
    shape = SHAPE._replace(capacity=40, outside=0, taps=3, channels=(1,))
    cache = cache_strategy("full")(shape, dtype=torch.float64, device=torch.device("cpu"))
    visit, slot = cache.admit([18, 2]), CacheSlot(1, 0)
    prompt_BL1 = torch.arange(36.0, dtype=torch.float64).view(2, 18, 1)
    assert visit.latest(slot, 0, prompt_BL1)[:, :2].abs().sum() == 0
    cache.leave_prompt(0, 18, 1)

    def token(step: int, positions: list[int], value: float) -> list[list[float]]:
        """Return the two inputs before a token of each row."""
        visit = TokenVisit(cache, Places.of(torch.tensor(positions).unsqueeze(1)))
        new = torch.full((2, 1, 1), value, dtype=torch.float64)
        return visit.latest(CacheSlot(step, 0), 0, new)[:, :-1, 0].tolist()

    assert token(3, [18, 2], 0.0) == [[16.0, 17.0], [18.0, 19.0]]  # the prompt ran step 1 alone
    for step in (1, 2):
        token(step, [18, 2], 100.0 + step)
    cache.leave(torch.tensor([0, 1]), torch.tensor([18, 2]), torch.tensor([2, 1]))
    assert token(2, [19, 3], 0.0) == [[17.0, 102.0], [19.0, 101.0]]
    assert token(3, [19, 3], 0.0) == [[17.0, 102.0], [19.0, 101.0]]
