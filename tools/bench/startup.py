"""Seconds from the command to the end of the first step, with an empty and a filled compile cache.

    python tools/bench/startup.py --pairs 3
    python tools/bench/startup.py --size 374m --seq-len 4096 --batch 4          # a GPU

Every start is a process of its own that trains one step of a small prepared source, as
`titan-loop train` does. Cold starts get an empty folder for what is compiled, warm ones the folder
that the first cold one left; they take turns. The parts are those of `startup_seconds` in
`run.json` (`titan_loop/training/startup.py`); hits are lookups in inductor's and autograd's caches
that found something. Without a compiler, or with `--no-compile`, cold and warm do the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from conditions import begin, parser_of
from small_run import add_run_flags, run_config
from timing import spread

from titan_loop.testing.tiny import tiny_source

CHILD = "--child"
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
                starts[kind].append(_start(source, folder / f"run-{kind}-{pair}", cache))
    print(f"seconds, median of {options.pairs} (range) | cold | warm")
    for part in starts["cold"][0]:
        cells = [spread([start[part] for start in starts[kind]], 2) for kind in starts]
        print(" | ".join([part, *cells]))
    return 0


def _start(source: Path, run: Path, cache: Path) -> dict[str, float]:
    """Train one step in a new process; return its parts, their sum, and cache hits."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, *sys.argv, CHILD, str(source), str(run)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    hits = json.loads(done.stdout.splitlines()[-1])
    parts = json.loads((run / "run.json").read_text())["startup_seconds"]
    return parts | {"all": sum(parts.values())} | hits


def _train_one_step(options: argparse.Namespace, source: Path, run: Path) -> int:
    """Run in the child: train, then print the hits as the last line."""
    from torch._dynamo.utils import counters

    from titan_loop.recipes.recipe import Recipe
    from titan_loop.recipes.runner import run_recipe

    config = run_config(options, source, steps=1)
    config.compile.enable = not options.no_compile
    config.checkpoint.enable = False
    run_recipe(Recipe.of_one_run("startup", config), folder=str(run))
    print(json.dumps({name: counters[group][name] for group, name in COUNTERS}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
