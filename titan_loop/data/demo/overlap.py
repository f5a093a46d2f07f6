"""Text that a corpus' training and held-out splits share, in sequences of words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

WORDS = 12
"""Length of a shared sequence."""

NEAR_DUPLICATE = 0.5
"""Share of a held-out document's sequences that also stand in training."""


def overlaps(
    train: Iterable[str], held_out: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Count the held-out text that is also trained on.

    Args:
        train: Documents of all domains.
        held_out: Domain → its held-out documents.

    Returns:
        Domain → share of held-out sequences of `WORDS` words that also stand in training, number of
        near-duplicates, and their share of the domain's held-out bytes. Shorter documents have no
        sequence and are no near-duplicate.
    """
    asked = {s for texts in held_out.values() for text in texts for s in _sequences(text)}
    shared: set[tuple[str, ...]] = set()
    for text in train:
        shared.update(asked.intersection(_sequences(text)))
    found = {}
    for domain, texts in held_out.items():
        sequences = near_duplicates = hits = near_bytes = 0
        for text in texts:
            in_training = [sequence in shared for sequence in _sequences(text)]
            sequences += len(in_training)
            hits += sum(in_training)
            if in_training and sum(in_training) >= NEAR_DUPLICATE * len(in_training):
                near_duplicates += 1
                near_bytes += len(text.encode())
        size = sum(len(text.encode()) for text in texts)
        found[domain] = {
            f"shared_{WORDS}_words": hits / max(sequences, 1),
            "near_duplicates": near_duplicates,
            "near_duplicate_bytes": near_bytes / max(size, 1),
        }
    return found


def _sequences(text: str) -> Iterator[tuple[str, ...]]:
    words = text.split()
    return zip(*(words[start:] for start in range(WORDS)), strict=False)
