"""`PermutationHops` in English words, with any tokenizer: for models that were trained on text.

    The guide of Anna is Peter                    fact
    The rival of the guide of Anna is Mark        two hops: first `guide`, then `rival`

Every name must be one token, so that every answer is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from titan_loop.data.tasks.task import Example, Task
from titan_loop.errors import UserError
from titan_loop.families.recurrent_depth.permutation_hops import Path, PermutationHops

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = (
    *("Anna", "Peter", "Mark", "Julia", "Simon", "Laura", "David", "Clara", "Martin", "Helen"),
    *("Oscar", "Emma", "James", "Alice", "Robert", "Maria", "Thomas", "Sarah", "Daniel", "Lucy"),
)
RELATIONS = ("friend", "teacher", "rival", "neighbor", "doctor", "guide", "partner", "boss")
_WORDS = ("The", "the", "of", "is", *RELATIONS, *NAMES)


@dataclass(frozen=True)
class EnglishHops(PermutationHops):
    """The task in the tokens of `tokenizer`, whose file is read on first use.

    Raises:
        UserError: As in the base class, or if there are fewer names or relations than asked for. On
            first use: the tokenizer splits a name.
    """

    name: ClassVar[str] = "english_hops"

    tokenizer: str = ""
    """A tokenizer.json in which every name, with the space before it, is one token; empty: every
    word of the task is a token of its own."""

    entities: int = 12
    relations: int = 4
    hops: int = 3
    asked_hops: int = 6
    trained_questions: int = 300
    fact_weight: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, words in (("entities", NAMES), ("relations", RELATIONS)):
            if getattr(self, field) > len(words):
                raise UserError(
                    f"EnglishHops {field} {getattr(self, field)} must be at most {len(words)}"
                )

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from titan_loop.text.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer)

    def _ids(self, text: str) -> list[int]:
        if not self.tokenizer:
            return [_WORDS.index(word) for word in text.split()]
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def names(self) -> list[int]:
        """Token ids of the entities."""
        ids = [self._ids(f" {name}") for name in NAMES[: self.entities]]
        if split := [name for name, tokens in zip(NAMES, ids, strict=False) if len(tokens) > 1]:
            raise UserError(
                f"EnglishHops tokenizer {self.tokenizer} splits {', '.join(split)}: every name "
                "must be one token; use a larger vocabulary of English"
            )
        return [token for (token,) in ids]

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary; without a tokenizer, the number of words."""
        return self._tokenizer.get_vocab_size() if self.tokenizer else len(_WORDS)

    @property
    def longest_example(self) -> int:
        """Tokens of a question of `asked_hops` hops with its answer."""
        longest = max(range(self.relations), key=lambda r: len(self._ids(f" {RELATIONS[r]}")))
        return len(self.encode(Path(0, (longest,) * self.asked_hops)).tokens)

    def text(self, question: Path) -> str:
        """Return a question without its answer."""
        named = [f"{RELATIONS[relation]} of" for relation in reversed(question.relations)]
        return f"The {' the '.join(named)} {NAMES[question.entity]} is"

    def encode(self, question: Path) -> Example:
        """Return the question and its answer as text."""
        answer = self.names[self.reached(question)[-1]]
        return Example.of_sequence(self._ids(self.text(question)), [answer])

    def waypoints(self, question: Path) -> Mapping[str, tuple[int, int]]:
        """Return the target only: the text does not name the entities between the hops."""
        return Task.waypoints(self, question)
