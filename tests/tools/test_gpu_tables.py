"""The tables of `tools/bench/gpu.sh`: they run on a CPU, and one that fails stops no other."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TABLE = 'print("a | b | c\\na warning\\n1 | 2 | 3")'


@pytest.fixture
def bench(monkeypatch) -> Any:
    """The modules of tools/bench, as its programs import them."""
    monkeypatch.syspath_prepend("tools/bench")
    for variable in ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, "")  # so that it is put back as it was
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    names = ("gpu", "gpu_rows", "gpu_tables")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def place(bench, tmp_path) -> Any:
    return bench.gpu_tables.Place(gpus=0, gpu="", machine="a CPU", output=tmp_path / "output")


def row(bench, folder: Path, name: str, program: str, **others: Any) -> Any:
    script = folder / f"{name}.py"
    script.write_text(program)
    read = bench.gpu_rows.printed_lines
    return bench.gpu_rows.Row(name=name, words=[str(script)], read=read, **others)


def table(bench, rows: list[Any], **others: Any) -> Any:
    settings = {"name": "throughput", "question": "?", "seconds": 600, "uses": "one"} | others
    return bench.gpu_tables.Table(rows=lambda _: rows, **settings)


def record_of(place: Any, name: str = "throughput") -> dict[str, Any]:
    return json.loads((place.output / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_tables_run_on_a_cpu(bench, tmp_path, monkeypatch):
    names = ["attention", "spread", "parity"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cpu", "--output", str(tmp_path), *names])
    assert bench.gpu.main() == 0
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert {record["state"] for record in found.values()} == {"done"}
    trained, flex, varlen = found["attention"]["rows"]
    assert trained["tokens/s"] > 0
    assert trained["loss"] > 1
    assert flex["skipped"] == varlen["skipped"] == "needs CUDA"
    (per_visit,) = found["spread"]["rows"]
    assert per_visit["command"].startswith("torchrun --nproc-per-node=2 -m titan_loop train")
    layouts = {(line["layout"], line["case"]) for line in found["parity"]["rows"]}
    assert layouts == {(ranks, case) for ranks in ("dp2", "tp2") for case in ("R4",)} | {
        (ranks, "R-changes-full") for ranks in ("dp2", "tp2", "tp2-no-sp", "cp2")
    }
    page = (tmp_path / "README.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("##")] == [
        f"## {name}" for name in names
    ]
    assert "| dp2 | R4 |" in page
    assert not list(tmp_path.glob("rows/*/*"))


def test_a_row_that_fails_is_recorded_and_the_others_run(bench, place, tmp_path):
    rows = [
        row(bench, tmp_path, "fails", f"{TABLE}\nraise ValueError('too large')"),
        row(bench, tmp_path, "silent", ""),
        row(bench, tmp_path, "absent", "", absent="needs CUDA"),
        row(bench, tmp_path, "runs", TABLE),
    ]
    assert bench.gpu.run_table(table(bench, rows), place, again=False) == "failed"
    numbers, failed, silent, absent, ran = record_of(place)["rows"]
    assert (numbers["row"], numbers["c"]) == ("fails", "3")  # printed before the failure
    assert failed["error"] == "ValueError: too large"
    assert silent["error"].startswith("no numbers in its output: IndexError")
    assert absent["skipped"] == "needs CUDA"
    assert (ran["a"], ran["b"], ran["c"]) == ("1", "2", "3")
    assert (place.output / "logs/throughput/runs.txt").read_text().startswith("a | b | c")
