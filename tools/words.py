"""Counts two habits in docstrings that hide the noun, and public methods without a docstring.

At most `MOST_WHAT` in 1,000 docstring words are "what"; "those of" and "that of" are not allowed. A
method without one passes if a method of that name in any class has a docstring, as its base has.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("titan_loop", "train_configs")
MOST_WHAT = 1.0
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
THOSE_OF = re.compile(r"\b(?:those|that)\s+of\b", re.IGNORECASE)


def docstrings(source: str) -> Iterator[str]:
    """Yield every docstring of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def methods(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of every public method, and whether it has a docstring."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                yield part.name, ast.get_docstring(part) is not None


def worst(counts: dict[Path, int]) -> str:
    """Return the five files with the most hits, e.g. "a.py (3), b.py (1)"."""
    files = sorted((path for path in counts if counts[path]), key=lambda path: -counts[path])
    return ", ".join(f"{path.relative_to(ROOT)} ({counts[path]})" for path in files[:5])


def main() -> None:
    """Exit with a line for each habit that exceeds its limit."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    texts = {path: "\n".join(docstrings(source)) for path, source in sources.items()}
    what = {path: len(WHAT.findall(text)) for path, text in texts.items()}
    those_of = {path: len(THOSE_OF.findall(text)) for path, text in texts.items()}
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts.values())
    rate = 1000 * sum(what.values()) / words
    problems: list[str] = []
    if rate > MOST_WHAT:
        problems.append(
            f'"what" is {rate:.1f} in 1,000 docstring words; at most {MOST_WHAT}: '
            f"use a noun instead, first in {worst(what)}"
        )
    found = [each for source in sources.values() for each in methods(source)]
    if silent := {name for name, _ in found} - {name for name, documented in found if documented}:
        problems.append(f"no class documents a method called {', '.join(sorted(silent))}")
    if any(those_of.values()):
        problems.append(f'"those of" or "that of": repeat the noun instead, in {worst(those_of)}')
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
