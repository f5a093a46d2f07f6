"""Every table that needs a GPU, in at most 30 minutes: `bash tools/bench/gpu.sh` says how.

Each table is a step of its own with a time limit. Its rows are written to OUTPUT/TABLE.json and
OUTPUT/README.md as they end, the output of their processes to OUTPUT/logs. A failed row has the
last line of its error and does not stop the others. A table that is done is not run again without
--again; one that failed or was interrupted is.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

from conditions import begin, machine, parser_of  # adds the checkout to the path

import torch  # isort: skip
from data import dense_source
from gpu_rows import GRACE_SECONDS, Numbers, Row, run_row
from gpu_tables import CPU_VOCABULARY, ONE_GPU, TABLES, VOCABULARY, Place, Table

from titan_loop.distributed.devices import DEVICES
from titan_loop.evaluation.share_work import rank_device
from titan_loop.storage.json_files import write_text

FLAG_OF_CPU = "--cpu"
TOKENS, CPU_TOKENS = 16_000_000, 50_000
SHORT_DOCUMENT, CPU_SHORT_DOCUMENT = 700, 16
OTHER_GPU = "h100-80gb"  # planned for if this machine's is unknown, or there is none

_writing = Lock()


def main() -> int:
    """Run the tables; return 1 if one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument(FLAG_OF_CPU, action="store_true", help="tiny shapes, although it has GPUs")
    parser.add_argument("--again", action="store_true", help="run tables that are done, too")
    parser.add_argument("--output", type=Path, help="default runs/gpu_tables/MACHINE")
    gpus = 0 if FLAG_OF_CPU in sys.argv else torch.cuda.device_count()
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes of all rows
        parser.set_defaults(beside_load=True)  # a CPU measures nothing
    device = rank_device() if gpus else torch.device("cpu")
    options = begin(parser, device=device)
    unknown = [name for name in options.tables if name not in TABLES]
    if unknown:
        parser.error(f"TABLE {unknown[0]} is unknown; choose from {', '.join(TABLES)}")
    gpu = _planned_gpu() if gpus else OTHER_GPU
    folder = options.output or Path("runs/gpu_tables") / (f"{gpu}x{gpus}" if gpus else "cpu")
    place = Place(gpus=gpus, gpu=gpu, machine=machine(device), output=folder.resolve())
    _write_sources(place)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place.output / "compiled"))
    chosen = [table for table in TABLES.values() if table.name in (options.tables or TABLES)]
    states = run_all(chosen, place, again=options.again)
    print(f"tables: {place.output / 'README.md'}")
    return 1 if "failed" in states else 0


def _planned_gpu() -> str:
    """Return the name in `titan-loop plan` of the first GPU, or of another one's."""
    found = torch.cuda.get_device_properties(0)
    names = [name for name in DEVICES if name.split("-")[0].upper() in found.name]
    away = {name: abs(DEVICES[name].memory_bytes - found.total_memory) for name in names}
    return min(names, key=away.__getitem__, default=OTHER_GPU)


def _write_sources(place: Place) -> None:
    """Write random tokens, in documents longer than a window and in short ones."""
    tokens, vocabulary, short = TOKENS, VOCABULARY, SHORT_DOCUMENT
    if place.on_cpu:
        tokens, vocabulary, short = CPU_TOKENS, CPU_VOCABULARY, CPU_SHORT_DOCUMENT
    for seed, (documents, mean) in enumerate({"whole": tokens, "short": short}.items()):
        folder = place.source(documents)
        if not folder.exists():
            part = folder.with_name(f"{documents}.part")
            shutil.rmtree(part, ignore_errors=True)
            dense_source(part, tokens, seed, vocabulary=vocabulary, mean_document=mean)
            part.rename(folder)


def run_all(chosen: Sequence[Table], place: Place, *, again: bool) -> list[str]:
    """Run tables of one GPU side by side if there are several, then the others; return states."""
    free: Queue[str] = Queue()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    for device in shown.split(",") if shown else map(str, range(place.gpus)):
        free.put(device)

    def on_one(table: Table) -> str:
        device = free.get()
        try:
            return run_table(table, place, again=again, device=device)
        finally:
            free.put(device)

    alone = [table for table in chosen if table.uses == ONE_GPU and place.gpus > 1]
    with ThreadPoolExecutor(max(1, place.gpus)) as pool:
        states = list(pool.map(on_one, alone))
    return states + [run_table(table, place, again=again) for table in chosen if table not in alone]


def run_table(table: Table, place: Place, *, again: bool, device: str = "") -> str:
    """Run a table unless it is done, and return its state; `device` is the GPU it is limited to."""
    path = place.output / f"{table.name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    if not again and (before.get("state"), before.get("gpus")) == ("done", place.gpus):
        print(f"{table.name}: done before; --again runs it again", flush=True)
        return "done"
    record: dict[str, Any] = {
        "table": table.name,
        "question": table.question,
        "state": "running",
        "machine": place.machine,
        "gpus": place.gpus,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "rows": [],
    }
    reason = table.absent_on_cpu if place.on_cpu else ""
    if not reason and table.uses == "all" and place.gpus == 1:
        reason = "needs several GPUs, found 1"
    rows = [] if reason else table.rows(place)
    if rows and all(row.absent for row in rows):
        reason = rows[0].absent
    shutil.rmtree(place.rows_of(table.name), ignore_errors=True)
    began = time.monotonic()
    for row in rows:
        grace = GRACE_SECONDS if row.ranks > 1 else 0  # a single process ends when it is told to
        left = table.seconds - grace - (time.monotonic() - began)
        record["rows"] += _run_row(row, table, place, left, device)
        record["seconds"] = round(time.monotonic() - began, 1)
        _write(place, path, record)
    failed = [row for row in record["rows"] if "error" in row]
    record["state"] = "skipped" if reason else "failed" if failed else "done"
    record["reason"] = reason or (failed[-1]["error"] if failed else "")
    _write(place, path, record)
    said = f": {record['reason']}" if record["reason"] else ""
    print(f"{table.name}: {record['state']}, {record['seconds']:.0f} s{said}", flush=True)
    return record["state"]


def _run_row(row: Row, table: Table, place: Place, seconds: float, device: str) -> list[Numbers]:
    if row.absent:
        return [{"row": row.name, "skipped": row.absent, "command": row.command}]
    if seconds <= 0:
        error = f"not started within {table.seconds:.0f} s, the limit of its table"
        return [{"row": row.name, "error": error, "command": row.command}]
    stem = "".join(letter if letter.isalnum() else "-" for letter in row.name) or table.name
    folder = place.rows_of(table.name) / stem
    log = place.output / "logs" / table.name / f"{stem}.txt"
    shutil.rmtree(folder, ignore_errors=True)
    for each in (folder, log.parent):
        each.mkdir(parents=True, exist_ok=True)
    limited = {"CUDA_VISIBLE_DEVICES": device} if device else {}
    row = row.with_environment(limited)
    lines = run_row(row, folder=folder, log=log, seconds=seconds, forked=place.on_cpu)
    shutil.rmtree(folder)  # checkpoints of gigabytes
    return [{**line, "command": row.command} for line in lines]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _write(place: Place, path: Path, record: dict[str, Any]) -> None:
    """Write a table's record, then the page of all tables."""
    with _writing:  # tables side by side share the page
        write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        paths = [place.output / f"{name}.json" for name in TABLES]
        records = [json.loads(path.read_text()) for path in paths if path.exists()]
        write_text(place.output / "README.md", "\n".join(page(records)) + "\n")


def page(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the page of tables, in Markdown."""
    lines = ["# Tables of tools/bench/gpu.sh"]
    if any(not record["gpus"] for record in records):
        lines += ["", "On a CPU, with tiny shapes: the numbers show that the code runs, no speed."]
    for record in records:
        said = f": {record['reason']}" if record.get("reason") else ""
        lines += ["", f"## {record['table']}", "", f"{record['question']}.".replace("?.", "?")]
        lines += ["", f"{record['state'].capitalize()}{said}, {record['seconds']:.0f} s, "]
        lines[-1] += f"{record['date'][:10]}, {record['machine']}, {record['commit']}."
        lines += _markdown(record["rows"])
    return lines


def _markdown(rows: Sequence[Numbers]) -> list[str]:
    if not rows:
        return []
    keys = dict.fromkeys(key for row in rows for key in row)
    names = [key for key in keys if key != "command"]
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    lines = ["| " + " | ".join(line) + " |" for line in (names, *cells)]
    commands = dict.fromkeys(row["command"] for row in rows)
    rule = "|" + "---|" * len(names)
    listed = [f"    {command}" for command in commands]
    return ["", lines[0], rule, *lines[1:], "", *listed]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
