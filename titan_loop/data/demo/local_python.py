"""A real three-domain corpus without a network: the text of the Python installation itself.

    code    sources of the standard library and of installed packages
    prose   docstrings (of other files than those in `code`), READMEs and package descriptions
    math    sympy's sources and docstrings, and solved Mano expressions

Every file has one role, chosen by a hash of its name, so no text stands in two domains. Which files
are taken, and which documents are held out, is a keyed hash, too: the same environment gives the
same corpus.
"""

import ast
import hashlib
import importlib.metadata
import json
import logging
import sysconfig
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from titan_loop.data.keyed import keyed_integer, keyed_uniform
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.storage.file_names import require_local
from titan_loop.storage.json_files import write_json

logger = logging.getLogger(__name__)

DOMAINS = ("code", "prose", "math")
_MODULUS, _MOST_OPERATIONS = 23, 10  # of the arithmetic in math
CARD = "card.json"
"""Written last: without it a corpus is incomplete."""

_SMALLEST_DOCUMENT_BYTES = 200
_LARGEST_DOCUMENT_BYTES = 200_000
_MEGABYTE = 1_000_000
_MANO_SHARE = 0.1  # of the math domain: the model sees the format without it taking over
_QUESTIONS_PER_DOCUMENT = 50
# Ourselves, and tools that came after the corpus of the results, which they would change.
_SKIPPED_PACKAGES = frozenset({"titan-loop", "pytest-xdist", "execnet"})
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})

Distributions = Mapping[str, importlib.metadata.Distribution]


class TextFile(NamedTuple):
    """A candidate: its package, its name within the environment, and where it lies."""

    package: str
    name: str
    path: Path


@dataclass
class _Domain:
    """The lines of a domain's two files."""

    limit_bytes: int
    held_out_fraction: float
    lines: dict[str, list[bytes]] = field(default_factory=lambda: {"train": [], "held_out": []})
    text_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def is_full(self) -> bool:
        return self.text_bytes >= self.limit_bytes

    def add(self, seen: set[bytes], package: str, identity: str, text: str) -> None:
        """Add a document to the split its identity hashes to, or count why not."""
        encoded = text.encode(errors="ignore")
        digest = hashlib.sha256(encoded).digest()
        if not _SMALLEST_DOCUMENT_BYTES <= len(encoded) <= _LARGEST_DOCUMENT_BYTES:
            self.dropped["too short or too long"] += 1
        elif digest in seen:
            self.dropped["duplicate"] += 1
        else:
            seen.add(digest)
            record = {"text": encoded.decode(), "id": identity, "source": package}
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            self.lines[split_of(identity, self.held_out_fraction)].append(line)
            self.text_bytes += len(encoded)


def build_local_python_corpus(
    output: str | Path, megabytes: Mapping[str, float], *, held_out_fraction: float = 0.05
) -> None:
    """Write `output/{code,prose,math}/{train,held_out}.jsonl` and `output/card.json`."""
    require_local(output, "output")
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held_out_fraction {held_out_fraction} must lie in [0, 1)")
    domains: dict[str, _Domain] = {}
    for name, size in megabytes.items():
        if not size > 0:
            raise UserError(f"{name}_megabytes {size} must be positive")
        domains[name] = _Domain(int(size * _MEGABYTE), held_out_fraction)
    _fill(domains)
    counts: dict[str, dict[str, int]] = {}
    for name, domain in domains.items():
        counts[name] = {split: len(lines) for split, lines in domain.lines.items()}
        write_splits(Path(output, name), domain.lines)
        logger.log(
            logging.INFO if domain.is_full else logging.WARNING,
            f"{name}: {counts[name]} documents, {domain.text_bytes} of the {domain.limit_bytes} "
            f"bytes asked for; dropped {dict(domain.dropped)}",
        )
    write_json(Path(output, CARD), {"documents": counts})


def write_splits(folder: Path, lines: Mapping[str, Sequence[bytes]]) -> None:
    """Write the JSON lines of each split into a folder, which is made if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, of_split in lines.items():
            (folder / f"{split}.jsonl").write_bytes(b"".join(of_split))
    except OSError as error:
        raise UserError(f"output {folder} cannot be written ({error.strerror})") from error


def _fill(domains: Mapping[str, _Domain]) -> None:
    seen: set[bytes] = set()
    math, number = domains["math"], 0
    while math.text_bytes < _MANO_SHARE * math.limit_bytes:
        text = mano_text(keyed_integer("mano document", number), _QUESTIONS_PER_DOCUMENT)
        math.add(seen, "mano", f"mano/{number:06d}", text)
        number += 1
    distributions = installed_distributions()
    for package, distribution in distributions.items():
        text = distribution.metadata.json.get("description")
        if package != "sympy" and isinstance(text, str) and not domains["prose"].is_full:
            domains["prose"].add(seen, package, f"{package}/description", text)
    for file in python_files(distributions):
        name, as_docstrings = _role(file)
        domain = domains[name]
        if domain.is_full:
            continue
        try:
            text = file.path.read_text(encoding="utf-8")
            text = docstrings(text) if as_docstrings else text
        except (OSError, SyntaxError, ValueError, RecursionError):  # not UTF-8, not Python
            domain.dropped["unreadable"] += 1
            continue
        domain.add(seen, file.package, document_identity(file), text)


def mano_text(key: int, questions: int) -> str:
    """Return a document of solved questions, one a line, with "=" in place of `<ans>`."""
    drawn = Mano(_MODULUS, _MOST_OPERATIONS).questions(key)
    lines = [f"Prefix expressions modulo {_MODULUS}, with their number of operations and value."]
    for _, question in zip(range(questions), drawn, strict=False):
        body = " ".join(str(symbol) for symbol in question.expression)
        lines.append(f"len_{question.operations} {body} = {question.answer}")
    return "\n".join(lines) + "\n"


def python_files(distributions: Distributions) -> list[TextFile]:
    """Return the candidates of the standard library and the packages, in the corpus' order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [
        TextFile("python", name.as_posix(), root / name)
        for name in names
        if _SKIPPED_FOLDERS.isdisjoint(name.parts)
    ]
    for package, distribution in distributions.items():
        for name in distribution.files or ():
            is_text = name.suffix == ".py" or name.name.lower() in ("readme.md", "readme.rst")
            if is_text and ".." not in name.parts:
                path = Path(str(distribution.locate_file(name)))
                files.append(TextFile(package, name.as_posix(), path))
    return sorted(files, key=lambda file: keyed_integer("order", file.package, file.name))


def document_identity(file: TextFile) -> str:
    """Return the `id` of the document that the corpus makes of a file."""
    return f"{file.package}/{file.name}" + "#docstrings" * _role(file)[1]


def split_of(identity: str, held_out_fraction: float) -> str:
    """Return "train" or "held_out", which depends on the document's identity alone."""
    return "held_out" if keyed_uniform("held_out", identity) < held_out_fraction else "train"


def _role(file: TextFile) -> tuple[str, bool]:
    """Return a file's domain, and whether its docstrings alone are taken."""
    if not file.name.endswith(".py"):
        return ("math" if file.package == "sympy" else "prose"), False
    as_docstrings = keyed_integer("role", file.package, file.name) % 2 == 0
    if file.package == "sympy":
        return "math", as_docstrings
    return ("prose", True) if as_docstrings else ("code", False)


def docstrings(source: str) -> str:
    """Return the docstrings of a module, its classes and functions, each under its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(source)
    parts: list[str] = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                parts.append(f"{name}\n\n{text}" if name else text)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{name}.{child.name}" if name else child.name)

    visit(tree, "")
    return "\n\n\n".join(parts)


def installed_distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return the installed packages by normalised name, in order, less those skipped."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and (normal := name.lower().replace("_", "-")) not in _SKIPPED_PACKAGES:
            found.setdefault(normal, distribution)  # the first on the path is the one imported
    return dict(sorted(found.items()))
