"""The tables of `tools/bench/gpu.sh`: a GPU is too rare for a row that cannot run there."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.cli.main import main

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


@pytest.mark.slow
def test_rows_of_gpus_pass_the_checks_of_training(bench, tmp_path, capsys):
    tables = bench.gpu_tables
    place = tables.Place(gpus=8, gpu="h100-80gb", machine="", output=tmp_path)
    names = ("checkpointing", "attention", "assemblies_all", "spread")
    rows = [row for name in names for row in tables.TABLES[name].rows(place)]
    assert len(rows) == 20
    for row in rows:
        assert tuple(row.words[: len(tables.TRAIN)]) == tables.TRAIN
        cluster = ["--nodes", "1", "--gpus-per-node", str(row.ranks), "--no-memory"]
        main(["plan", tables.STUDY, *cluster, *row.words[len(tables.TRAIN) :]])
        assert capsys.readouterr().err == "", row.name
