"""Random small faults in modules, each against the module's own tests; prints those that survive.

    python tools/mutants.py [--modules 20] [--mutants 5] [--seed 0] [MODULE.py ...]

A mutant changes one operator, constant or condition. The tests of a module are those of its name in
the mirrored folder, else the test files that import it; a module that more than three files import
is not drawn. Its tests have to pass without a fault first. Everything runs in a worktree of the
last commit, each time in a process forked from one that has imported torch; tests/README.md has the
last table.
"""

import argparse
import ast
import copy
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_TEST_FILES = 3
MARKERS = "not slurm and not hostile and not effects and not multiprocess and not slow"
SLOWER = 5
"""Times the duration without a fault after which a mutant counts as hanging, that is, as killed."""
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
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in _SWAPS:
        new.ops = [_SWAPS[type(new.ops[0])]()]  # type: ignore[list-item]
    elif isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in _SWAPS:
        new.op = _SWAPS[type(new.op)]()  # type: ignore[assignment]
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        new = new.operand
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new = ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
        new = ast.Constant(new.value + 1)
    else:
        return None
    return ast.unparse(new)


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
    tested = [path for path in every if 0 < len(tests_of(path)) <= MOST_TEST_FILES]
    tested = [path for path in tested if path.name != "__init__.py"]
    chosen = [Path(name) for name in given.modules_given] or drawn.sample(tested, given.modules)
    made = survived = 0
    _import_libraries()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "checkout"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", tree], cwd=ROOT, check=True
        )
        try:
            for module in chosen:
                tests, began = tests_of(module), time.monotonic()
                if not _pass(tests, tree):
                    output = (tree.parent / "output").read_text()
                    print(f"{module}: {' '.join(tests)} fails without a fault", output, flush=True)
                    continue
                limit = 60 + SLOWER * (time.monotonic() - began)
                source = (tree / module).read_text(encoding="utf-8")
                faults = [*mutants(source)]
                for fault in drawn.sample(faults, min(given.mutants, len(faults))):
                    content = source.encode()
                    content = content[: fault.start] + fault.after.encode() + content[fault.stop :]
                    (tree / module).write_bytes(content)
                    lives = _pass(tests, tree, limit)
                    made, survived = made + 1, survived + lives
                    if lives:
                        change = f"`{fault.before}` → `{fault.after}`"
                        print(f"| {module}:{fault.line} | {change} |", flush=True)
                (tree / module).write_text(source, encoding="utf-8")
                print(f"{module}: done, {made} mutants so far", file=sys.stderr, flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(f"{made} mutants in {len(chosen)} modules, {survived} survived")
    return 0


def _import_libraries() -> None:
    """Import what takes seconds and does not depend on the checkout."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.dont_write_bytecode = True  # a changed module may be as old and as long as the whole one
    import datasets  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def _pass(tests: Sequence[str], tree: Path, limit_seconds: float = 3600) -> bool:
    """Run tests in a process of their own."""
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            os.setsid()
            signal.alarm(int(limit_seconds))
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            os.environ["PYTHONPATH"] = str(tree)
            output = os.open(tree.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            import pytest

            command = ["-q", "-x", "-p", "no:cacheprovider", "-m", MARKERS, *tests]
            # A library has imported one of pytest's plugins.
            ended = pytest.main([*command, "-W", "ignore::pytest.PytestAssertRewriteWarning"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(int(ended))  # nothing of the parent's is cleaned up here
    _, status = os.waitpid(child, 0)
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
