"""Examples of READMEs, run as they stand there."""

import shlex
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_loop.cli.main import main


def readme_of(package: ModuleType) -> Path:
    """Return the README in a package's folder."""
    return Path(package.__path__[0]) / "README.md"


def example(readme: Path, language: str = "python") -> str:
    """Return the text of a README's only block in this language."""
    (text,) = readme.read_text(encoding="utf-8").split(f"```{language}\n")[1:]
    return text.split("```")[0]


def run_commands(readme: Path, language: str = "bash") -> int:
    """Run the commands of a README's only block in this language; return how many there are."""
    lines = example(readme, language).replace("\\\n", " ").splitlines()
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "titan-loop"
        assert main([name for word in words for name in (sorted(glob(word)) or [word])]) == 0, line
    return len(lines)


def run_example(readme: Path) -> dict[str, Any]:
    """Run a README's Python example; return the names it defined."""
    names: dict[str, Any] = {}
    exec(compile(example(readme), str(readme), "exec"), names)
    return names
