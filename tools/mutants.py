"""Random small faults in modules, each against the module's own tests; prints those that survive.

    python tools/mutants.py [--modules 20] [--mutants 5] [--seed 0] [MODULE.py ...]

A mutant changes one operator, constant or condition. The tests of a module are those of its name in
the mirrored folder, else the test files that import it. Everything runs in a worktree of the last
commit; tests/README.md has the last table.
"""

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 300
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        line: Where it stands.
        before: Source of the expression.
        after: What replaces it.
        start: Offset in the module's bytes.
        stop: End of the expression.
    """

    line: int
    before: str
    after: str
    start: int
    stop: int


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every fault that can be made in a module."""
    lines = source.encode().splitlines(keepends=True)
    begins = [sum(map(len, lines[:index])) for index in range(len(lines) + 1)]
    tree = ast.parse(source)
    skipped = {id(node) for each in ast.walk(tree) if _is_skipped(each) for node in ast.walk(each)}
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.expr):
            continue
        changed = _changed(node)
        if changed is None:
            continue
        start = begins[node.lineno - 1] + node.col_offset
        stop = begins[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = source.encode()[start:stop].decode()
        yield Mutant(node.lineno, before, f"({changed})", start, stop)


def _is_skipped(node: ast.AST) -> bool:
    """Whether faults inside can hurt nobody: annotations, assertions, messages."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise | ast.AnnAssign | ast.arguments)


def _changed(node: ast.expr) -> str | None:
    copy = ast.parse(ast.unparse(node), mode="eval").body
    if isinstance(copy, ast.Compare) and len(copy.ops) == 1 and type(copy.ops[0]) in _SWAPS:
        copy.ops = [_SWAPS[type(copy.ops[0])]()]  # type: ignore[list-item]
    elif isinstance(copy, ast.BinOp | ast.BoolOp) and type(copy.op) in _SWAPS:
        copy.op = _SWAPS[type(copy.op)]()  # type: ignore[assignment]
    elif isinstance(copy, ast.UnaryOp) and isinstance(copy.op, ast.Not):
        copy = copy.operand
    elif isinstance(copy, ast.IfExp):
        copy.body, copy.orelse = copy.orelse, copy.body
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, bool):
        copy = ast.Constant(not copy.value)
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, int | float):
        copy = ast.Constant(copy.value + 1)
    else:
        return None
    return ast.unparse(copy)


def tests_of(module: Path) -> list[str]:
    """Return the test files of a module, relative to the checkout."""
    mirrored = Path("tests", *module.parts[1:-1], f"test_{module.name}")
    if (ROOT / mirrored).exists():
        return [str(mirrored)]
    name = ".".join(module.with_suffix("").parts)
    found = subprocess.run(
        ["grep", "-rlwF", name, "tests", "--include=test_*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return sorted(found.stdout.split())


def main() -> int:
    """Make the faults that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules_given", nargs="*", metavar="MODULE.py")
    parser.add_argument("--modules", type=int, default=20)
    parser.add_argument("--mutants", type=int, default=5, help="faults in a module")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    drawn = random.Random(given.seed)
    every = sorted(path.relative_to(ROOT) for path in ROOT.glob("titan_loop/**/*.py"))
    tested = [path for path in every if path.name != "__init__.py" and tests_of(path)]
    chosen = [Path(name) for name in given.modules_given] or drawn.sample(tested, given.modules)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    made = survived = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "checkout"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", tree], cwd=ROOT, check=True
        )
        environment["PYTHONPATH"] = str(tree)
        try:
            for module in chosen:
                source = (tree / module).read_text(encoding="utf-8")
                faults = [*mutants(source)]
                for fault in drawn.sample(faults, min(given.mutants, len(faults))):
                    content = source.encode()
                    content = content[: fault.start] + fault.after.encode() + content[fault.stop :]
                    (tree / module).write_bytes(content)
                    killed = _fails(tests_of(module), tree, environment)
                    made, survived = made + 1, survived + (not killed)
                    if not killed:
                        change = f"`{fault.before}` → `{fault.after}`"
                        print(f"| {module}:{fault.line} | {change} |", flush=True)
                (tree / module).write_text(source, encoding="utf-8")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(f"{made} mutants in {len(chosen)} modules, {survived} survived")
    return 0


def _fails(tests: list[str], tree: Path, environment: dict[str, str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    command += ["-m", "not slurm and not hostile and not effects and not multiprocess and not slow"]
    try:
        ended = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            timeout=MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
