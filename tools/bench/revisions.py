"""A training step of this checkout beside another revision's: what a refactor may not slow down.

    python tools/bench/revisions.py e4eda1c                    # both CPU shapes of plain.py
    python tools/bench/revisions.py e4eda1c --compile          # their compiled steps, too
    python tools/bench/revisions.py e4eda1c --size 374m --seq-len 4096 --tolerance 1e-3    # a GPU

Each revision runs in a process of its own, in a worktree, with its own `tools/bench/plain.py`; the
processes take turns at single steps, so that both see the same machine. Losses must agree, by
default in every bit, and the median ratio of times, the revision's over this checkout's, must reach
--least, or the program ends with 1.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

from conditions import begin, checkout_of, parser_of
from timing import ratios, results_in_turn, spread

WORKER = """
import json, sys, time
sys.argv = ["plain.py"]
import torch
import plain
from timing import seconds_of
from training_step import Job, build, extra_bytes, start, trainer_step
answers, sys.stdout = sys.stdout, sys.stderr
start()
step = None
for line in sys.stdin:
    request = json.loads(line)
    if "case" in request:
        case = request["case"]
        if isinstance(case, int):
            case = plain.CASES[case]
        else:
            case = plain.Case(case["size"], plain.OuroOptions(**case), *request["batch"], 0.0)
        case.model.recurrent_steps = request["recurrent_steps"]
        job = Job(model=case.model, seq_len=case.seq_len, windows=case.windows,
                  compiled=request["compiled"])
        model = build(job)
        step = trainer_step(job, model)
        answer = {"name": case.name, "loss": float(step())}
    elif "memory" in request:
        answer = {"bytes": extra_bytes(step, model)}
    else:
        began = time.process_time()
        seconds = seconds_of(step)
        answer = {"seconds": time.process_time() - began if request["processor"] else seconds}
    print(json.dumps(answer), file=answers, flush=True)
"""


class Checkout:
    """A process that trains steps with the code of one checkout when it is asked."""

    def __init__(self, folder: Path) -> None:
        """Start it.

        Args:
            folder: Top of the checkout; its `titan_loop` and `tools/bench` are imported.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=folder / "tools/bench",
            env={**os.environ, "PYTHONPATH": f"{folder}:{folder / 'tools/bench'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **request: object) -> dict[str, float]:
        """Send one request and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("titan-loop: error: a checkout's process ended; run its plain.py")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> int:
    """Compare every shape and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("revision", help="what to compare this checkout with")
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15, help="timed rounds")
    parser.add_argument("--compile", action="store_true", help="time compiled steps, too")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="compare processor seconds; with OMP_NUM_THREADS=1 other load disturbs them less",
    )
    parser.add_argument("--size", help="a named size instead of the two CPU shapes")
    parser.add_argument("--seq-len", type=int, default=4096, help="with --size")
    parser.add_argument("--batch", type=int, default=1, help="with --size")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of losses, relative")
    parser.add_argument("--least", type=float, default=0.98, help="median ratio to reach")
    options = begin(parser)
    here = Path(__file__).resolve().parents[2]
    kinds = [False, True] if options.compile else [False]
    good = True
    with checkout_of(options.revision) as other:
        print("shape | step s before | step s now | before over now | extra MB before | now")
        cases: list[object] = [0, 1] if options.size is None else [{"size": options.size}]
        for case in cases:
            for compiled in kinds:
                good &= _compare(other, here, case, compiled, options)
    return 0 if good else 1


def _compare(
    other: Path, here: Path, case: object, compiled: bool, options: argparse.Namespace
) -> bool:
    before, now = checkouts = [Checkout(other), Checkout(here)]
    try:
        asked = {"case": case, "recurrent_steps": options.recurrent_steps, "compiled": compiled}
        asked["batch"] = [options.seq_len, options.batch]
        built = [checkout.ask(**asked) for checkout in checkouts]
        steps = [
            lambda checkout=checkout: checkout.ask(processor=options.processor_time)["seconds"]
            for checkout in checkouts
        ]
        times = results_in_turn(steps, pairs=options.pairs, warmup=2)
        extra = [checkout.ask(memory=True)["bytes"] / 1e6 for checkout in (before, now)]
    finally:
        for checkout in checkouts:
            checkout.close()
    faster = ratios(*times)
    name = f"{built[0]['name']}{', compiled' if compiled else ''}"
    print(
        f"{name} | {spread(times[0])} | {spread(times[1])} | {spread(faster, 2)} | "
        f"{extra[0]:.0f} | {extra[1]:.0f}",
        flush=True,
    )
    agree = math.isclose(*(each["loss"] for each in built), rel_tol=options.tolerance)
    if not agree:
        print(f"losses differ: {built[0]['loss']} and {built[1]['loss']}", file=sys.stderr)
    return agree and statistics.median(faster) >= options.least


if __name__ == "__main__":
    raise SystemExit(main())
