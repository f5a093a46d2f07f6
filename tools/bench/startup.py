"""Seconds, files and bytes from the command to the end of the first step, cold and warm.

    python tools/bench/startup.py --pairs 3
    python tools/bench/startup.py --size 374m --seq-len 4096 --batch 4          # a GPU

Every start is a process of its own that trains one step of a small prepared source, as
`titan-loop train` does. Cold starts get an empty folder for what is compiled, and the system is
told to forget what it holds of the environment's files (those that a running process maps stay);
warm ones get the folder that the first cold one left; they take turns. The parts are those of
`startup_seconds` in `run.json` (`titan_loop/training/startup.py`); hits are lookups in inductor's
and autograd's caches that found something. Files are those that Python opened or loaded, MB read
is what it asked for (libraries, which are mapped, are not in it), MB from disk what a disk gave.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from conditions import begin, parser_of
from small_run import add_run_flags, run_config
from timing import spread

from tests.support.tiny import tiny_source

CHILD = "--child"
WATCHED = """
import json, os, runpy, sys
files = set()
def watch(event, details):
    if event in ("open", "import"):
        files.update(word for word in details[:2] if isinstance(word, str) and "/" in word)
sys.addaudithook(watch)
sys.argv.pop(0)
sys.path[0] = os.path.dirname(sys.argv[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    with open("/proc/self/io") as file:
        meters = {name: int(count) / 1e6 for name, count in (line.split(": ") for line in file)}
    sizes = {"MB read": meters["rchar"], "MB from disk": meters["read_bytes"]}
    print(json.dumps({"files opened": len(files)} | sizes))
"""
COUNTERS = (("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"))


def main() -> int:
    """Start in turn cold and warm, and print the parts."""
    parser = parser_of(__doc__)
    add_run_flags(parser, size="debugmodel")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(CHILD, nargs=2, metavar=("SOURCE", "RUN"), help=argparse.SUPPRESS)
    if CHILD in sys.argv:
        options = parser.parse_args()
        return _train_one_step(options, *map(Path, options.child))
    options = begin(parser)
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = tiny_source(folder)
        for pair in range(options.pairs):
            for kind in starts:
                cache = folder / ("cache-0" if kind == "warm" else f"cache-{pair}")
                if kind == "cold":
                    _forget_files()
                starts[kind].append(_start(source, folder / f"run-{kind}-{pair}", cache))
    print(f"seconds and counts, median of {options.pairs} (range) | cold | warm")
    for part in starts["cold"][0]:
        cells = [spread([start[part] for start in starts[kind]], 2) for kind in starts]
        print(" | ".join([part, *cells]))
    return 0


def _start(source: Path, run: Path, cache: Path) -> dict[str, float]:
    """Train one step in a new process; return its parts, their sum, cache hits and files."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", WATCHED, *sys.argv, CHILD, str(source), str(run)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    hits, files = map(json.loads, done.stdout.splitlines()[-2:])
    parts = json.loads((run / "run.json").read_text())["startup_seconds"]
    return parts | {"all": sum(parts.values())} | hits | files


def _forget_files() -> None:
    """Let the system drop the environment's files, and Python's own, from memory."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")}:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _train_one_step(options: argparse.Namespace, source: Path, run: Path) -> int:
    """Run in the child: train, then print the hits as the last line."""
    from torch._dynamo.utils import counters

    from titan_loop.recipes.recipe import Recipe
    from titan_loop.recipes.start import run_recipe

    config = run_config(options, source, steps=1)
    config.compile.enable = not options.no_compile
    config.checkpoint.enable = False
    run_recipe(Recipe.of_one_run("startup", config), folder=str(run))
    print(json.dumps({name: counters[group][name] for group, name in COUNTERS}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
