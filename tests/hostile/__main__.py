"""Runs the hostile corpus: `python -m tests.hostile --cases 300`; see README.md beside it.

Ends with 1 if a case traced back, hung, crashed, executed something or lost what was whole.
"""

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TITAN_LOOP_HOSTILE_MARKER="")

import titan_loop.compat as compat  # before any torchtitan module
import torch

import titan_loop.cli
from tests.hostile import whole
from tests.hostile.cases import VERBS, Case, cases
from tests.hostile.forked import Ending, run_forked
from tests.hostile.spoiling import MARKER_VARIABLE, copied
from titan_loop.cli.main import main as titan_loop_main


def run_case(case: Case, things: Path, work: Path) -> tuple[Ending, str]:
    """Spoil a copy of everything, run the command, and return how it ended and what was wrong."""
    folder = work / f"case-{case.number}"
    copied(things, folder)
    marker = folder / "executed"
    os.environ[MARKER_VARIABLE] = str(marker)
    try:
        _, signed = case.prepare(folder)
        before = _contents(folder)

        def act() -> int:
            os.chdir(folder)
            compat.skip_final_pause()
            torch.set_num_threads(1)
            return titan_loop_main(VERBS[case.verb].split())

        ending = run_forked(act, work / f"{case.number}.log")
        fault = ending.fault
        if not fault and marker.exists():
            fault = "executed what the file holds"
        if not fault and (after := _contents(folder)) != before:
            changed = {name for name in before | after if before.get(name) != after.get(name)}
            fault = f"changed {min(changed)}"
        if not fault and case.verb == "train" and ending.code == 0:
            fault = _other_result(case, folder, things, signed=signed)
    finally:
        shutil.rmtree(folder)
    return ending, fault


def _contents(folder: Path) -> dict[str, str]:
    """Return a hash of every file that no command may change, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in ("out", "run")
    }


def _other_result(case: Case, folder: Path, things: Path, *, signed: bool) -> str:
    """Return what a training that went on got wrong.

    Its data may be what was spoiled, and whoever signs other weights trains those.
    """
    if case.target.pattern.startswith("source/") or (signed and "distcp" in case.target.pattern):
        return ""
    last = [_last(run / "metrics.jsonl") for run in (folder / "run", things / "finished")]
    same = all(last[0].get(name) == last[1][name] for name in ("step", "loss", "data_hash"))
    return "" if same else f"trained to {last[0]} instead of {last[1]}"


def _last(path: Path) -> dict:
    return json.loads(path.read_bytes().splitlines()[-1])


def _import_everything() -> None:
    """Import what verbs import when they run, so that no child has to."""
    for module in pkgutil.walk_packages(titan_loop.__path__, "titan_loop."):
        if module.name != "titan_loop.__main__":
            try:
                importlib.import_module(module.name)
            except Exception as error:  # an extra that is not installed
                print(f"{module.name} is not imported: {error}")
    importlib.import_module("tokenizers")


def _work(share: list[Case], things: Path, work: Path, results: Path) -> int:
    with results.open("w") as file:
        for case in share:
            ending, fault = run_case(case, things, work)
            record = {
                "number": case.number,
                "name": case.name,
                "target": case.target.name,
                "code": ending.code,
                "seconds": round(ending.seconds, 2),
                "fault": fault,
                "output": ending.output[-2000:] if fault else "",
            }
            print(json.dumps(record), file=file, flush=True)
    return 0


def _table(records: list[dict]) -> str:
    """Return Markdown: for every target, how often commands refused, went on, and failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    slowest: dict[str, float] = defaultdict(float)
    for record in records:
        what = "failed" if record["fault"] else {0: "went on", 2: "refused"}.get(record["code"])
        counts[record["target"]][what or "found damage"] += 1
        slowest[record["target"]] = max(slowest[record["target"]], record["seconds"])
    kinds = ("refused", "went on", "found damage", "failed")
    rows = [f"| spoiled | cases | {' | '.join(kinds)} | slowest (s) |", "|---" * 7 + "|"]
    for target, count in sorted(counts.items()):
        cells = [target, str(count.total()), *(str(count[kind]) for kind in kinds)]
        rows.append(f"| {' | '.join(cells)} | {slowest[target]:.1f} |")
    total = sum(counts.values(), Counter())
    cells = ["all", str(total.total()), *(str(total[kind]) for kind in kinds)]
    rows.append(f"| {' | '.join(cells)} | {max(slowest.values()):.1f} |")
    return "\n".join(rows)


def main() -> int:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="show every ending")
    given = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    chosen = [*cases(given.first, given.cases)]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        things, hub = work / "things", work / "hub"
        things.mkdir()
        hub.mkdir()
        os.environ["HF_HOME"] = str(hub)  # read when `datasets` is imported
        _import_everything()

        def build() -> int:
            compat.skip_final_pause()
            whole.build(things)
            return 0

        made = run_forked(build, work / "build.log", most_seconds=600)
        if made.code != 0:
            print(made.output)
            return 1
        print(f"built after {time.monotonic() - began:.0f} s")
        workers: list[int] = []
        for part in range(given.workers):
            worker = os.fork()
            if worker == 0:
                try:
                    own = work / f"worker-{part}"
                    own.mkdir()
                    share = chosen[part :: given.workers]
                    os._exit(_work(share, things, own, work / f"{part}.results"))
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(1)
            workers.append(worker)
        codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
        lines = [
            line for part in range(given.workers) for line in (work / f"{part}.results").open()
        ]
    records = sorted(map(json.loads, lines), key=lambda record: record["number"])
    failed = [record for record in records if record["fault"]]
    for record in records if given.keep else failed:
        print(f"{record['name']}: code {record['code']}, {record['fault']}\n{record['output']}")
    print(_table(records))
    print(f"{len(records)} cases, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed or any(codes) or len(records) != len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
