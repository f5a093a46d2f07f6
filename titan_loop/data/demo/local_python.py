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
import platform
import shlex
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from titan_loop.data.demo.overlap import WORDS, overlaps
from titan_loop.data.keyed import keyed_integer, keyed_uniform
from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError
from titan_loop.storage.json_files import write_json
from titan_loop.storage.local_path import require_local

logger = logging.getLogger(__name__)

DOMAINS = ("code", "prose", "math")
SMALLEST_DOCUMENT_BYTES = 200
LARGEST_DOCUMENT_BYTES = 200_000
_MEGABYTE = 1_000_000
_MANO_SHARE = 0.1
"""Share of the math domain: the model sees the task's format without it taking over."""
_QUESTIONS_PER_DOCUMENT = 50
_STANDARD_LIBRARY = "python"
_SKIPPED_PACKAGES = frozenset({"titan-loop", "pytest-xdist", "execnet"})
"""Ourselves, and tools that came after the corpus of the results, which they would change."""
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


class TextFile(NamedTuple):
    """A candidate: its package, its name within the environment, and where it lies."""

    package: str
    name: str
    path: Path


@dataclass(slots=True)
class DomainFiles:
    """The two JSONL files of a domain under construction, and what the card says of them."""

    folder: Path
    held_out_fraction: float
    limit_bytes: int
    text_bytes: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)
    packages: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    lines: dict[str, list[bytes]] = field(default_factory=lambda: {"train": [], "held_out": []})

    @property
    def is_full(self) -> bool:
        """Whether the domain has reached its size."""
        return self.text_bytes.total() >= self.limit_bytes

    def texts(self, split: str) -> list[str]:
        """Return the documents of a split."""
        return [json.loads(line)["text"] for line in self.lines[split]]

    def add(self, seen: set[bytes], package: str, identity: str, text: str) -> None:
        """Add a document to the split its identity hashes to, or count why not."""
        encoded = text.encode(errors="ignore")
        digest = hashlib.sha256(encoded).digest()
        if len(encoded) < SMALLEST_DOCUMENT_BYTES:
            self.dropped["too short"] += 1
        elif len(encoded) > LARGEST_DOCUMENT_BYTES:
            self.dropped["too long"] += 1
        elif digest in seen:
            self.dropped["duplicate"] += 1
        else:
            seen.add(digest)
            split = split_of(identity, self.held_out_fraction)
            record = {"text": encoded.decode(), "id": identity, "source": package}
            self.lines[split].append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self.documents[split] += 1
            self.text_bytes[split] += len(encoded)
            self.packages.add(package)


def build_local_python_corpus(
    output: str | Path,
    *,
    code_megabytes: float = 12,
    prose_megabytes: float = 8,
    math_megabytes: float = 6,
    held_out_fraction: float = 0.05,
    at_least_megabytes: float = 0,
) -> dict[str, object]:
    """Write `output/{code,prose,math}/{train,held_out}.jsonl` and `output/card.json`.

    Args:
        output: The corpus' folder; made if missing. Files of an earlier corpus are replaced.
        code_megabytes: Size of the code in 10**6 bytes of text; less if there is not so much.
        prose_megabytes: Size of the prose, likewise.
        math_megabytes: Size of the math, likewise.
        held_out_fraction: Share of documents in `held_out.jsonl`, in [0, 1).
        at_least_megabytes: Smallest size of all domains together, in 10**6 bytes of text.

    Returns:
        The card: per domain and split documents, bytes and SHA-256, what was dropped and why, the
        held-out text that is in training, too (`titan_loop.data.demo.overlap`), the licence of
        every package used, versions and the command.

    Raises:
        UserError: For a size or fraction out of range, an unwritable output, too little text, or if
            sympy is missing.
    """
    require_local(output, "output")
    output = Path(output)
    sizes = dict(zip(DOMAINS, (code_megabytes, prose_megabytes, math_megabytes), strict=True))
    for name, size in sizes.items():
        if not size > 0:
            raise UserError(f"{name}_megabytes {size} must be positive")
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held_out_fraction {held_out_fraction} must lie in [0, 1)")
    distributions = installed_distributions()
    if "sympy" not in distributions:
        raise UserError("the math domain needs sympy, which is not installed: pip install sympy")
    make_folder(output)
    domains = {
        name: DomainFiles(output / name, held_out_fraction, int(size * _MEGABYTE))
        for name, size in sizes.items()
    }
    seen: set[bytes] = set()
    _fill_from_sources(domains, seen, distributions)
    found = sum(domain.text_bytes.total() for domain in domains.values()) / _MEGABYTE
    if found < at_least_megabytes:
        raise UserError(
            f"this environment has {found:.1f} MB of text and at_least_megabytes is "
            f"{at_least_megabytes:g}: install more packages into it, or lower it"
        )
    written = {name: _write_domain(domain) for name, domain in domains.items()}
    _count_overlaps(domains, written)
    packages = set().union(*(domain.packages for domain in domains.values()))
    return write_card(output, "domains", written, licences(distributions, packages))


def _count_overlaps(domains: dict[str, DomainFiles], written: dict[str, dict[str, object]]) -> None:
    """Add to each domain's part of the card, and log, the held-out text that is trained on, too."""
    train = (text for domain in domains.values() for text in domain.texts("train"))
    held_out = {name: domain.texts("held_out") for name, domain in domains.items()}
    for name, overlap in overlaps(train, held_out).items():
        written[name]["held_out_in_training"] = overlap
        logger.info(
            "%s: %.1f %% of the held-out sequences of %d words are in training, too; %d of %d "
            "documents are near-duplicates, with %.1f %% of the held-out bytes",
            name,
            100 * overlap[f"shared_{WORDS}_words"],
            WORDS,
            overlap["near_duplicates"],
            len(held_out[name]),
            100 * overlap["near_duplicate_bytes"],
        )


def write_card(
    output: Path,
    parts_name: str,
    parts: Mapping[str, object],
    licences_used: dict[str, dict[str, str]],
) -> dict[str, object]:
    """Write and return `card.json`: the parts under their name, licences, versions and command."""
    card = {
        "format_version": 1,
        parts_name: parts,
        "licences": licences_used,
        "versions": {"python": platform.python_version()},
        "command": shlex.join(sys.argv),
    }
    write_json(output / "card.json", card)
    return card


def write_lines(path: Path, lines: list[bytes]) -> str:
    """Write a JSONL file and return its SHA-256."""
    content = b"".join(lines)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def make_folder(output: Path) -> None:
    """Make the folder of a corpus, before any work is done for it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {output} cannot be written ({error.strerror})") from error


def _fill_from_sources(
    domains: dict[str, DomainFiles],
    seen: set[bytes],
    distributions: dict[str, importlib.metadata.Distribution],
) -> None:
    _add_mano(domains["math"], seen)
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
        except (UnicodeDecodeError, OSError):
            domain.dropped["unreadable"] += 1
            continue
        identity = document_identity(file)
        if as_docstrings:
            try:
                text = docstrings(text)
            except (SyntaxError, ValueError, RecursionError):
                domain.dropped["no valid Python"] += 1
                continue
        domain.add(seen, file.package, identity, text)
        if all(domain.is_full for domain in domains.values()):
            break


def python_files(
    distributions: dict[str, importlib.metadata.Distribution],
) -> list[TextFile]:
    """Return the candidates of the standard library and the packages, in the corpus' order."""
    files = [*_standard_library(), *_package_files(distributions)]
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


def _add_mano(domain: DomainFiles, seen: set[bytes]) -> None:
    number = 0
    while domain.text_bytes.total() < _MANO_SHARE * domain.limit_bytes:
        key = keyed_integer("mano document", number)
        identity = f"mano/{number:06d}"
        domain.add(seen, "mano", identity, mano_text(key, _QUESTIONS_PER_DOCUMENT))
        number += 1


def _standard_library() -> Iterator[TextFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(name.parts):
            yield TextFile(_STANDARD_LIBRARY, name.as_posix(), path)


def _package_files(
    distributions: dict[str, importlib.metadata.Distribution],
) -> Iterator[TextFile]:
    for package, distribution in distributions.items():
        for name in distribution.files or ():
            is_text = name.suffix == ".py" or name.name.lower() in ("readme.md", "readme.rst")
            if is_text and ".." not in name.parts:
                yield TextFile(package, name.as_posix(), Path(str(distribution.locate_file(name))))


def installed_distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return the installed packages by normalised name, in order, less those skipped."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and (normal := name.lower().replace("_", "-")) not in _SKIPPED_PACKAGES:
            found.setdefault(normal, distribution)  # the first on the path is the one imported
    return dict(sorted(found.items()))


def licences(
    distributions: dict[str, importlib.metadata.Distribution], used: set[str]
) -> dict[str, dict[str, str]]:
    """Return version and licence of every package in `used`, in order."""
    found = {
        _STANDARD_LIBRARY: {"version": platform.python_version(), "licence": "PSF-2.0"},
        "mano": {"version": "generated", "licence": "no rights reserved: generated numbers"},
    }
    for name, distribution in distributions.items():
        metadata = distribution.metadata
        classifiers = [
            entry.split("::")[-1].strip()
            for entry in metadata.get_all("Classifier") or ()
            if entry.startswith("License ::")
        ]
        candidates = [
            *(metadata.get_all("License-Expression") or ()),
            "; ".join(classifiers),
            *(metadata.get_all("License") or ()),
        ]
        # Some put the whole licence text there: its first line names it.
        lines = [text.strip().splitlines()[0] for text in candidates if text.strip()]
        found[name] = {"version": distribution.version, "licence": (lines or ["not stated"])[0]}
    return {name: found[name] for name in sorted(used)}


def _write_domain(domain: DomainFiles) -> dict[str, object]:
    splits: dict[str, object] = {}
    try:
        domain.folder.mkdir(parents=True, exist_ok=True)
        for split, lines in domain.lines.items():
            splits[split] = {
                "documents": domain.documents[split],
                "text_bytes": domain.text_bytes[split],
                "sha256": write_lines(domain.folder / f"{split}.jsonl", lines),
            }
    except OSError as error:
        raise UserError(f"output {domain.folder} cannot be written ({error.strerror})") from error
    if not domain.is_full:
        logger.warning(
            "%s: this environment has only %d of the %d bytes asked for",
            domain.folder.name,
            domain.text_bytes.total(),
            domain.limit_bytes,
        )
    logger.info(
        "%s: %d documents, %d bytes of text; dropped %s",
        domain.folder.name,
        domain.documents.total(),
        domain.text_bytes.total(),
        ", ".join(f"{count} {reason}" for reason, count in domain.dropped.items()) or "nothing",
    )
    return {**splits, "dropped": dict(domain.dropped), "packages": sorted(domain.packages)}


def mano_text(key: int, questions: int, *, max_operations: int = 10, modulus: int = 23) -> str:
    """Return a document of solved questions, one a line, with "=" in place of `<ans>`."""
    drawn = Mano(modulus, max_operations).questions(key)
    lines = [f"Prefix expressions modulo {modulus}, with their number of operations and value."]
    for _, question in zip(range(questions), drawn, strict=False):
        body = " ".join(str(symbol) for symbol in question.expression)
        lines.append(f"len_{question.operations} {body} = {question.answer}")
    return "\n".join(lines) + "\n"
