"""Key-value caches for a looped decoder, which keep all or one of a token's R recurrent steps.

At step r a token attends to its *own* step-r keys and values, and to every earlier token's keys and
values that the strategy kept:

| strategy | memory | kept of a token that left after step e | seen at a deeper step r > e |
|---|---|---|---|
| `full` | R caches | steps 1 … e | step e stands for every deeper one |
| `last` | 1 | step e | step e |
| `first` | 1 | step 1 | step 1 |
| `averaged` | 1 | the mean of steps 1 … e | that mean |

A prompt runs all R steps, or fewer by request, and each step sees the prompt's keys of that same
step, under any strategy. Those keys are at hand while step r runs, so the shared strategies never
hold R caches, not even for the prompt.

Layers outside the loop have one cache each: a prelude visits a token once, and later tokens see a
coda's keys of the state that was read last.

A row's token at position p is stored at index p. So padding needs no mask (no query looks past its
own position), and shortening a row rolls it back.

Source: Zhu et al. 2025 (Ouro), arXiv 2510.25741, §5.4.2. Averaging rotated keys equals rotating
averaged ones, since all steps of a token share its position. The paper does not combine sharing
with early exit; the rule for skipped steps is ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loop.errors import UserError, require_known
from titan_loop.models.context import CacheSlot, Entries
from titan_loop.models.family import get_family
from titan_loop.plugins import find, names

Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer, (B, L, N, H) each."""
EntryPair = tuple[Entries, Entries]
"""The same where they stand in a cache."""


class Places(NamedTuple):
    """Places where new tokens of all rows are stored.

    Attributes:
        seen: S, the number of keys that they may attend to: the largest position plus one.
        in_step: Whether every row has one token, at position S − 1; slices then replace indices.
        queries: Number of query heads, if attention may read one token's keys where they stand.
    """

    positions_BL: Tensor
    seen: int
    in_step: bool
    queries: int | None = None

    @classmethod
    def of(cls, positions_BL: Tensor, *, queries: int | None = None) -> "Places":
        """Return the places of tokens at (B, L) positions."""
        positions, single = positions_BL.flatten().tolist(), positions_BL.shape[1] == 1
        seen = max(positions) + 1
        in_step = single and min(positions) + 1 == seen
        return cls(positions_BL, seen, in_step, queries if single else None)


class CacheShape(NamedTuple):
    """Sizes of a cache: R, looped and other layers, B, tokens a row can hold, K-V heads, H.

    `window` is the number of keys that windowed layers see; None without such layers. `taps` and
    `channels` are of the short convolutions of a layer. `drafts` tokens may be taken back at once.
    """

    steps: int
    layers: int
    outside: int
    rows: int
    capacity: int
    heads: int
    head_dim: int
    window: int | None = None
    taps: int = 1
    channels: tuple[int, ...] = ()
    drafts: int = 0

    @property
    def ring(self) -> int:
        """Tokens whose inputs of short convolutions are kept: the taps, and drafts taken back."""
        return self.taps + self.drafts


class LoopCache(ABC):
    """Keys and values of the rows of one batch.

    Attributes:
        rows: Number of rows now; they come first in memory.
        outside: Cache of the layers outside the loop, of which it keeps the latest visit.
        is_shared: Whether the R steps share one cache; else each has its own.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.rows = 0
        self._kept_steps = 1 if self.is_shared else shape.steps
        self._memory = torch.zeros(
            (2, self._kept_steps, shape.layers, shape.rows, *shape[4:7]), dtype=dtype, device=device
        )
        entries = shape.rows * shape.capacity * shape.heads  # of a layer at one step
        apart = entries * (shape.layers * (self._kept_steps - 1) + 1)  # from its first to its last
        self._tables = [
            self._memory.view(2, -1, shape.head_dim)[:, entries * layer :][:, :apart].unbind()
            for layer in range(shape.layers)
        ]
        self._visited: tuple[Places, int | Tensor, Tensor, Tensor] | None = None
        # Views of every slot, made once: an index of five parts costs more than the slice of two.
        self._slots = [
            [(step[0, layer], step[1, layer]) for layer in range(shape.layers)]
            for step in self._memory.unbind(1)
        ]
        self._every_row = torch.arange(shape.rows, device=device).unsqueeze(1)
        self._last_B1 = self._every_row[:0]
        size = (self._kept_steps, shape.layers, shape.rows, shape.ring)
        # Inputs of convolutions; the one of position p stands at index p modulo their number.
        self._rings = [
            torch.zeros(*size, width, dtype=dtype, device=device) for width in shape.channels
        ]
        self.allocated_bytes = self._memory.nbytes + sum(ring.nbytes for ring in self._rings)
        self.outside: LastCache | None = None
        if shape.outside:
            shape = shape._replace(steps=1, layers=shape.outside, outside=0)
            self.outside = LastCache(shape, dtype=dtype, device=device)
            self.allocated_bytes += self.outside.allocated_bytes

    @classmethod
    def entries(cls, shape: CacheShape) -> int:
        """Return the number of keys of one head that a row of `shape.capacity` tokens needs."""
        steps = 1 if cls.is_shared else shape.steps
        return (steps * shape.layers + shape.outside) * shape.capacity

    @property
    def _kept(self) -> Tensor:
        """(2, kept steps, layers, B, capacity, N, H) of the current rows."""
        return self._memory[:, :, :, : self.rows]

    @property
    def _row(self) -> Tensor:
        return self._every_row[: self.rows]

    def admit(self, lengths: Sequence[int]) -> "PromptVisit":
        """Append rows with prompts of these lengths; return the view that their pass writes to."""
        self._last_B1 = torch.tensor(lengths, device=self._memory.device).unsqueeze(1) - 1
        first, self.rows = self.rows, self.rows + len(lengths)
        assert self.rows <= self.shape.rows
        if self.outside is not None:
            self.outside.admit(lengths)
        return PromptVisit(self, first)

    def _write_slot(self, slot: int, layer: int, new: Pair, places: Places) -> Pair | EntryPair:
        """Store new tokens of all rows in one slot; return its content up to S."""
        if places.queries is not None and not places.in_step:
            return self._write_entries(slot + 1, layer, new, places, places.queries)
        keys, values = self._slots[slot][layer]
        seen = keys[: self.rows, : places.seen], values[: self.rows, : places.seen]
        for part_BSNH, new_BLNH in zip(seen, new, strict=True):
            if places.in_step:
                part_BSNH[:, -1:] = new_BLNH
            else:
                part_BSNH[self._row, places.positions_BL] = new_BLNH
        return seen

    def _write_entries(
        self, step: int | Tensor, layer: int, new: Pair, places: Places, queries: int
    ) -> EntryPair:
        """Store new tokens in each row's step; return where all that they see stands."""
        known = self._visited  # the same for all layers of a visit
        if known is None or known[0] is not places or known[1] is not step:
            known = self._visited = places, step, *self._entries(step, places, queries)
        *_, token_B, seen_MT = known
        keys_TH, values_TH = self._tables[layer]
        for table_TH, new_BLNH in zip((keys_TH, values_TH), new, strict=True):
            new_BE = new_BLNH.flatten(1)
            table_TH.view(-1, new_BE.shape[1]).index_copy_(0, token_B, new_BE)
        return Entries(keys_TH, seen_MT), Entries(values_TH, seen_MT)

    def _entries(self, step: int | Tensor, places: Places, queries: int) -> tuple[Tensor, Tensor]:
        """Return the places of new tokens in a layer's table, and `Entries.seen_MT` of it."""
        shape, device = self.shape, self._memory.device
        slot_B1 = (step if isinstance(step, int) else step.unsqueeze(1)) - 1
        row_B1 = slot_B1 * (shape.layers * shape.rows) + self._row
        first_B1 = row_B1 * shape.capacity
        # Past its end, where memory may hold anything, a row reads its last key again; masked.
        key_BS = torch.arange(places.seen, device=device).minimum(places.positions_BL)
        head_N1 = torch.arange(queries, device=device).unsqueeze(1) // (queries // shape.heads)
        entry_E = ((first_B1 + key_BS).unsqueeze(1) * shape.heads + head_N1).flatten()
        seen_MT = torch.sparse_csr_tensor(
            torch.arange(0, len(entry_E) + 1, places.seen, device=device),
            entry_E,
            entry_E.new_zeros(len(entry_E), dtype=self._memory.dtype),
            (self.rows * queries, len(self._tables[0][0])),
            check_invariants=False,
        )
        return (first_B1 + places.positions_BL)[:, 0], seen_MT

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; one that moves takes the place of one that goes."""
        for target, row in enumerate(rows):
            if target != row:
                self._memory[:, :, :, target] = self._memory[:, :, :, row]
                for ring in self._rings:
                    ring[:, :, target] = ring[:, :, row]
        self.rows = len(rows)
        if self.outside is not None:
            self.outside.select(rows)

    def write_prompt(self, step: int, layer: int, first_row: int, new_2BLNH: Tensor) -> None:
        """Store one layer's keys and values of whole prompts, in the rows from `first_row` on.

        A shared cache has one slot, which every step overwrites.
        """
        slot = min(step, self._kept_steps) - 1
        self._kept[:, slot, layer, first_row:, : new_2BLNH.shape[2]] = new_2BLNH

    def newest(self, entries: Tensor, places: int) -> Tensor:
        """Return (B, places, …) of (B, L, …) entries of the prompts that were admitted last.

        The entry of a position is at its remainder, and of those with one the latest.
        """
        place_W = torch.arange(places, device=entries.device)
        # A short prompt has nothing at some places; 0 stands there, and is never read.
        position_BW = (self._last_B1 - (self._last_B1 - place_W) % places).clamp_min(0)
        row_B1 = torch.arange(len(position_BW), device=entries.device).unsqueeze(1)
        return entries[row_B1, position_BW]

    def write_prompt_inputs(
        self, step: int, layer: int, first_row: int, part: int, x_BLC: Tensor
    ) -> None:
        """Store the latest inputs of one convolution of whole prompts."""
        slot = min(step, self._kept_steps) - 1
        ring = self._rings[part][slot, layer, first_row : self.rows]
        ring.copy_(self.newest(x_BLC, self.shape.ring))

    def write_inputs(
        self, step: int | Tensor, layer: int, part: int, x_BLC: Tensor, places: Places
    ) -> Tensor:
        """Store one convolution's inputs of new tokens, and return them behind the ones before."""
        ring = self._rings[part][:, layer]
        slot_B1 = _of_rows(step, ring, 2).clamp(max=self._kept_steps) - 1
        ahead_T = torch.arange(1 - self.shape.taps, 0, device=ring.device)
        before_BT = (places.positions_BL[:, :1] + ahead_T) % self.shape.ring
        before_BTC = ring[slot_B1, self._row, before_BT].to(x_BLC.dtype)
        ring[slot_B1, self._row, places.positions_BL % self.shape.ring] = x_BLC.to(ring.dtype)
        return torch.cat([before_BTC, x_BLC], dim=1)

    @abstractmethod
    def write_tokens(
        self, step: int | Tensor, layer: int, new: Pair, places: Places
    ) -> Pair | EntryPair:
        """Store a layer's keys and values of new tokens; return all to attend to."""

    def leave_prompt(self, first_row: int, length: int, step: int) -> None:
        """Copy the entries of the prompts' last step to deeper ones, in rows from `first_row`."""
        prompts = self._kept[:, :, :, first_row:, :length]
        prompts[:, step:] = prompts[:, step - 1 : step]  # empty in a shared cache
        for ring in self._rings:
            ring[step:, :, first_row : self.rows] = ring[step - 1, :, first_row : self.rows]

    @abstractmethod
    def leave(self, rows: Tensor, positions: Tensor, steps: Tensor) -> None:
        """Make final the entries of E tokens that just left: rows, positions, last steps, (E,)."""


class FullCache(LoopCache):
    """One cache per recurrent step; a skipped step reads the last one that ran."""

    is_shared = False

    def write_tokens(
        self, step: int | Tensor, layer: int, new: Pair, places: Places
    ) -> Pair | EntryPair:
        """Store in each row's own step.

        Keys of rows at different steps are copied into one tensor, unless attention may read them
        where they stand.
        """
        if isinstance(step, int):
            return self._write_slot(step - 1, layer, new, places)
        if places.queries is None:
            slot_B1 = step.unsqueeze(1) - 1
            kept_2RBSNH = self._kept[:, :, layer, :, : places.seen]
            kept_2RBSNH[:, slot_B1, self._row, places.positions_BL] = torch.stack(new)
            keys_BSNH, values_BSNH = kept_2RBSNH[:, slot_B1[:, 0], self._row[:, 0]]
            return keys_BSNH, values_BSNH
        return self._write_entries(step, layer, new, places, places.queries)

    def leave(self, rows: Tensor, positions: Tensor, steps: Tensor) -> None:
        """Copy the last step that ran to every deeper one."""
        for row, position, step in torch.stack((rows, positions, steps), dim=1).tolist():
            entry_2RNNH = self._memory[:, :, :, row, position]
            entry_2RNNH[:, step:] = entry_2RNNH[:, step - 1 : step]
            for ring in self._rings:
                inputs_RNC = ring[:, :, row, position % self.shape.ring]
                inputs_RNC[step:] = inputs_RNC[step - 1]


class LastCache(LoopCache):
    """Keeps the entry of the last step that ran, which overwrites earlier ones."""

    def write_tokens(
        self, step: int | Tensor, layer: int, new: Pair, places: Places
    ) -> Pair | EntryPair:
        """Overwrite; the token itself must see the current step's entry."""
        return self._write_slot(0, layer, new, places)

    def leave(self, rows: Tensor, positions: Tensor, steps: Tensor) -> None:
        """Do nothing: the last step's entry is already in place."""


class _PendingCache(LastCache):
    """Keeps the final entry of a running token apart: the token itself sees the current step's."""

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype=dtype, device=device)
        self._pending = torch.zeros_like(self._memory[:, 0, :, :, :1])
        self.allocated_bytes += self._pending.nbytes

    def write_tokens(
        self, step: int | Tensor, layer: int, new: Pair, places: Places
    ) -> Pair | EntryPair:
        new_2BLNH = torch.stack(new)
        step_B = _of_rows(step, new_2BLNH, 4)
        waiting_2BLNH = self._pending[:, layer, : self.rows]
        waiting_2BLNH.copy_(self._combined(waiting_2BLNH, new_2BLNH, step_B))
        return super().write_tokens(step, layer, new, places)

    def leave(self, rows: Tensor, positions: Tensor, steps: Tensor) -> None:
        self._kept[:, 0][:, :, rows, positions] = self._pending[:, :, rows, 0]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._pending[:, :, : len(rows)] = self._pending[:, :, list(rows)]

    @abstractmethod
    def _combined(self, kept: Tensor, new: Tensor, step: Tensor) -> Tensor:
        """Return the final entry after `step`, which broadcasts, from `kept` and `new`."""


class FirstCache(_PendingCache):
    """Keeps the entry of step 1."""

    def write_prompt(self, step: int, layer: int, first_row: int, new_2BLNH: Tensor) -> None:
        """Store step 1 only."""
        if step == 1:
            super().write_prompt(step, layer, first_row, new_2BLNH)

    def _combined(self, kept: Tensor, new: Tensor, step: Tensor) -> Tensor:
        return torch.where(step == 1, new, kept)


class AveragedCache(_PendingCache):
    """Keeps the mean over the steps that ran."""

    def write_prompt(self, step: int, layer: int, first_row: int, new_2BLNH: Tensor) -> None:
        """Update the running mean."""
        kept_2BLNH = self._kept[:, 0, layer, first_row:, : new_2BLNH.shape[2]]
        kept_2BLNH.lerp_(new_2BLNH, 1 / step)

    def _combined(self, kept: Tensor, new: Tensor, step: Tensor) -> Tensor:
        return torch.lerp(kept, new, 1 / step.to(new.dtype))


STRATEGIES: dict[str, type[LoopCache]] = {
    "full": FullCache,
    "last": LastCache,
    "first": FirstCache,
    "averaged": AveragedCache,
}


def cache_strategy(name: str, family: str | None = None) -> type[LoopCache]:
    """Return the cache class of this name; raise `UserError` if it is unknown.

    It must be one that models of `family` have; None allows every family's.
    """
    known = {*STRATEGIES, *names("kv_caches")}
    require_known("kv_cache", name, known)
    if family is not None and name not in (has := get_family(family).kv_caches):
        raise UserError(
            f"kv_cache={name} is a cache that model.family={family} does not have; it has "
            f"{', '.join(sorted(has))}"
        )
    return STRATEGIES.get(name) or find("kv_caches", name)


class PromptVisit:
    """The `KeyValueCache` of a pass over whole prompts, which see only themselves."""

    def __init__(self, cache: LoopCache, first_row: int) -> None:
        self._cache = cache
        self._first_row = first_row

    def update(self, slot: CacheSlot, k_BLNH: Tensor, v_BLNH: Tensor) -> Pair:
        """Store, and return the same keys and values: all rows are at one step."""
        cache, step = _addressed(self._cache, slot)
        assert isinstance(step, int), "a prompt's rows share their step"
        cache.write_prompt(step, slot.layer, self._first_row, torch.stack((k_BLNH, v_BLNH)))
        return k_BLNH, v_BLNH

    def latest(self, slot: CacheSlot, part: int, x_BLC: Tensor) -> Tensor:
        """Store; return the same inputs behind zeros."""
        cache, step = _addressed(self._cache, slot)
        assert isinstance(step, int), "a prompt's rows share their step"
        cache.write_prompt_inputs(step, slot.layer, self._first_row, part, x_BLC)
        return F.pad(x_BLC, (0, 0, cache.shape.taps - 1, 0))


class TokenVisit:
    """The `KeyValueCache` of a pass over new tokens of all rows."""

    def __init__(self, cache: LoopCache, places: Places) -> None:
        self._cache = cache
        self._places = places

    def update(self, slot: CacheSlot, k_BLNH: Tensor, v_BLNH: Tensor) -> Pair | EntryPair:
        """Store, and return the first S keys and values of every row."""
        cache, step = _addressed(self._cache, slot)
        return cache.write_tokens(step, slot.layer, (k_BLNH, v_BLNH), self._places)

    def latest(self, slot: CacheSlot, part: int, x_BLC: Tensor) -> Tensor:
        """Store; return the same inputs behind the ones of the tokens before."""
        cache, step = _addressed(self._cache, slot)
        return cache.write_inputs(step, slot.layer, part, x_BLC, self._places)


def _addressed(cache: LoopCache, slot: CacheSlot) -> tuple[LoopCache, int | Tensor]:
    if slot.step is not None:
        return cache, slot.step
    assert cache.outside is not None
    return cache.outside, 1


def _of_rows(step: int | Tensor, like: Tensor, axes: int) -> Tensor:
    """Return steps as (B or 1, 1, …) on a tensor's device; a number is no copy from the host."""
    if isinstance(step, int):
        return torch.full((1,) * axes, step, device=like.device)
    return step.view(-1, *[1] * (axes - 1))
