"""Real chats without a network: what functions of this Python installation do, and worked numbers.

    user:      What does `fmean(data, weights)` of statistics do?
    assistant: Convert data to floats and compute the arithmetic mean.

One chat in `_ONE_IN` is a Mano expression and its value. A file's chats are in the split in which
`local_python` puts the document it makes of the file: text that is held out there is held out
here.

    python -m tools.local_chats OUTPUT [--megabytes 1 …]
"""

import ast
import json
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from titan_loop.data.demo.local_python import (
    TextFile,
    document_identity,
    installed_distributions,
    python_files,
    split_of,
    write_splits,
)
from titan_loop.data.keyed import keyed_integer
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError, exit_code
from titan_loop.storage.file_names import require_local

logger = logging.getLogger(__name__)

LARGEST_CHAT_BYTES = 400
"""Question and answer together, so that any chat fits a window of 512 tokens at a token a byte."""

_SMALLEST_ANSWER_BYTES = 30
_MOST_OF_A_FILE = 8
_MEGABYTE = 1_000_000
_ONE_IN = 4
_MANO_MODULUS = 23
_MANO_OPERATIONS = 3


class Chat(NamedTuple):
    """One question and its answer."""

    question: str
    answer: str


def build_local_chats(
    output: Annotated[str | Path, tyro.conf.Positional],
    *,
    megabytes: float = 1.0,
    held_out_fraction: float = 0.05,
) -> None:
    """Write `output/{train,held_out}.jsonl` of questions and answers.

    Args:
        output: The folder; made if missing. Earlier chats are replaced.
        megabytes: Size in 10**6 bytes of questions and answers; less if the installation has less.
        held_out_fraction: As for the corpus of `local_python`, to hold out the same files.

    Raises:
        UserError: For a size or fraction out of range, or an unwritable output.
    """
    if not megabytes > 0:
        raise UserError(f"megabytes {megabytes} must be positive")
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held_out_fraction {held_out_fraction} must lie in [0, 1)")
    require_local(output, "output")
    distributions = installed_distributions()
    chats = _Chats()
    for file in python_files(distributions):
        if chats.text_bytes.total() >= megabytes * _MEGABYTE:
            break
        split = split_of(document_identity(file), held_out_fraction)
        for chat in _file_chats(file)[:_MOST_OF_A_FILE]:
            chats.add(file.package, split, chat)
            if chats.count % _ONE_IN == _ONE_IN - 1:
                chats.add("mano", *_mano_chat(chats.count))
    write_splits(Path(output), chats.lines)
    for split, lines in chats.lines.items():
        logger.info(
            "%s/%s: %d chats, %d bytes of text", output, split, len(lines), chats.text_bytes[split]
        )


class _Chats:
    """What is to be written."""

    def __init__(self) -> None:
        self.lines: dict[str, list[bytes]] = {"train": [], "held_out": []}
        self.text_bytes: Counter[str] = Counter()
        self._seen: set[Chat] = set()

    @property
    def count(self) -> int:
        return sum(map(len, self.lines.values()))

    def add(self, package: str, split: str, chat: Chat) -> None:
        """Add a chat, unless its answer, or a number's question, is there already."""
        new = chat if package == "mano" else Chat("", chat.answer)
        if new in self._seen:
            return
        self._seen.add(new)
        self.text_bytes[split] += _size(chat)
        record = {**chat._asdict(), "id": f"{package}/{self.count}", "source": package}
        self.lines[split].append(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def function_chats(source: str, module: str) -> Iterator[Chat]:
    """Yield a chat for every public function or method whose docstring begins with a short answer.

    Args:
        source: Python source of the module.
        module: Name of the module in the questions.

    Raises:
        SyntaxError, ValueError, RecursionError: The source is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(source)

    def visit(node: ast.AST, name: str) -> Iterator[Chat]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_"):
                continue
            qualified = f"{name}.{child.name}" if name else child.name
            if isinstance(child, ast.ClassDef):
                yield from visit(child, qualified)
                continue
            first, _, _ = (ast.get_docstring(child) or "").partition("\n\n")
            arguments = ", ".join(argument.arg for argument in child.args.args)
            chat = Chat(
                f"What does `{qualified}({arguments})` of {module} do?", " ".join(first.split())
            )
            if (
                len(chat.answer.encode(errors="ignore")) >= _SMALLEST_ANSWER_BYTES
                and _size(chat) <= LARGEST_CHAT_BYTES
            ):
                yield chat

    yield from visit(tree, "")


def _file_chats(file: TextFile) -> list[Chat]:
    if not file.name.endswith(".py"):
        return []
    module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        return list(function_chats(file.path.read_text(encoding="utf-8"), module))
    except (UnicodeError, OSError, SyntaxError, ValueError, RecursionError):
        return []


def _mano_chat(number: int) -> tuple[str, Chat]:
    """Return the split and the chat of one expression, small enough to be learnt."""
    generator = random.Random(keyed_integer("mano chat", number))
    mano = Mano(_MANO_MODULUS, _MANO_OPERATIONS)
    operations = mano.choose(generator, level=0)
    question = mano.draw(generator, operations)
    body = " ".join(map(str, question.expression))
    chat = Chat(f"What is {body} modulo {_MANO_MODULUS}, in prefix notation?", str(question.answer))
    return ("held_out" if mano.is_held_out(question) else "train"), chat


def _size(chat: Chat) -> int:
    return sum(len(part.encode(errors="ignore")) for part in chat)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        tyro.cli(build_local_chats)
    except UserError as error:
        print(f"titan-loop: error: {error}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from error
