"""Decoding in the engines that exports are for: CPU time of a token, one thread, same weights.

    .venv/onnx/bin/python tools/bench/engines.py --environments .venv
    … --dims 128 --tokens 64 --rounds 1
    … --against dfd5e2b4    # beside that revision's own engine

tools/test_engines.sh and test_hf.sh make the environments, of which an engine has its own; one
without is left out. Exports to ONNX need the first. Engines take turns. Times are CPU seconds of
the process, so other programs matter less; prompts and compilation are left out. Exits are at step
R/2 of every token, by a gate that says the same of all. Weights are random: rounded ones soon write
other tokens. Memory is the process's. Ends with code 1 if an aim is missed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from conditions import begin, checkout_of, parser_of

from titan_loop.cli import main as cli
from titan_loop.models.dense import DenseOptions
from titan_loop.models.family import build_decoder

DRIVER = Path(__file__).with_name("engine_driver.py")
PROMPT, STEPS, VOCABULARY = [5, 9, 100, 33, 270, 12], 4, 300
ENVIRONMENTS = {"onnxruntime": "onnx", "llama.cpp": "engines", "transformers": "hf5"}
HALF = {"threshold": 0.6}
"""Leaves after step 2 where λ is 1/2 at every step: S is 1/2, 1/4, …"""
EXACT = ("titan_loop", "titan_loop, compiled", "transformers", "llama.cpp", "onnxruntime")


class Row(NamedTuple):
    """A way to run the model: engine, file, and what is asked of it."""

    engine: str
    file: str
    asked: Mapping[str, Any] = MappingProxyType({})


ROWS = {
    "titan_loop": Row("titan_loop", "plain/run"),
    "titan_loop, compiled": Row("titan_loop", "plain/run", {"compile": True}),
    "transformers": Row("transformers", "folder"),
    "llama.cpp": Row("llama.cpp", "model.gguf"),
    "llama.cpp, q8_0": Row("llama.cpp", "q8.gguf"),
    "onnxruntime": Row("onnxruntime", "onnx"),
    "onnxruntime, exits at R/2": Row("onnxruntime", "onnx", HALF),
    "onnxruntime, int8": Row("onnxruntime", "int8"),
    "onnxruntime, int4": Row("onnxruntime", "int4"),
}
BEFORE = "titan_loop, before"
"""The row of `--against`."""
AIMS = {
    (BEFORE, "onnxruntime"): {128: 6.0},
    (BEFORE, "titan_loop, compiled"): {96: 3.0, 128: 3.0},
    ("transformers", "onnxruntime"): {128: 5.0, 512: 1.7},
    ("onnxruntime", "llama.cpp"): {128: -1.4, 512: -1.4},
    ("onnxruntime, exits at R/2", "onnxruntime"): {128: -0.65, 512: -0.65},
}
"""Least, or with a minus most, ratio of two rows' times, by width."""


def write_models(place: Path, dim: int, files: Collection[str]) -> None:
    """Write one model for every engine: it has a gate where an engine can have one.

    Of its exports, only `files` and the folder that another revision imports are written.
    """
    from tests.families.ouro.hugging_face.conftest import randomise, write_run
    from tests.support.llama_runs import train_tokenizer

    tokenizer = train_tokenizer(place / "tokenizer.json", digits=True, every_byte=False)
    shape = {
        "dim": dim,
        "n_layers": 4,
        "n_heads": dim // 32,
        "n_kv_heads": dim // 64,
        "hidden_dim": 3 * dim,
        "vocab_size": VOCABULARY,
        "recurrent_steps": STEPS,
        "norm_placement": "every_step",
    }
    torch.manual_seed(0)
    models = {
        name: build_decoder(DenseOptions(**shape, exit_gate=gate), max_seq_len=512)  # type: ignore[arg-type]
        for name, gate in {"plain": False, "gated": True}.items()
    }
    randomise(models["plain"])
    with torch.no_grad():
        models["plain"].lm_head.weight[:3] = 0  # no special token, at which engines stop
    models["gated"].load_state_dict(models["plain"].state_dict(), strict=False)
    for name, model in models.items():
        options = DenseOptions(**shape, exit_gate=name == "gated")  # type: ignore[arg-type]
        write_run(place / name / "run", options, model)  # type: ignore[arg-type]
    exports = {
        "folder": ("plain", "nanbeige", "float32"),
        "model.gguf": ("plain", "gguf", "float32"),
        "q8.gguf": ("plain", "gguf", "q8_0"),
        "onnx": ("gated", "onnx", "float32"),
        "int8": ("gated", "onnx", "int8"),
        "int4": ("gated", "onnx", "int4"),
    }
    for file, (run, to, dtype) in exports.items():
        if file not in {*files, "folder"}:
            continue
        flags = ["--to", to, "--dtype", dtype, "--tokenizer", str(tokenizer)]
        output = ["--output", str(place / file)]
        command = ["convert", "export", str(place / run / "run"), *output, *flags]
        assert cli.main(command) == 0, command


def import_before(place: Path, checkout: Path) -> None:
    """Make a run of the other revision from the folder for transformers."""
    command = ["convert", "import", str(place / "folder"), "--output", str(place / "before")]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run(
        [sys.executable, "-m", "titan_loop", *command], env=environment, cwd=place, check=True
    )


def answer_of(
    python: Path, row: Row, place: Path, checkout: Path | None = None, **asked: Any
) -> dict[str, Any]:
    """Run a row in a new process, with the code of another checkout if one is given."""
    request = json.dumps({"prompt": PROMPT, "steps": STEPS, **row.asked, **asked})
    command = [str(python), str(DRIVER), row.engine, str(place / row.file), request]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = checkout or Path(__file__).resolve().parents[2]
    environment = {**os.environ, **threads, "PYTHONPATH": str(path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{row.engine}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    dim: int,
    pythons: dict[str, Path],
    place: Path,
    tokens: int,
    rounds: int,
    before: Path | None,
) -> bool:
    """Print the table of a width; return whether its aims are met."""
    rows = {name: row for name, row in ROWS.items() if row.engine in pythons}
    write_models(place, dim, {row.file for row in rows.values()})
    if before is not None:
        import_before(place, before)
        rows[BEFORE] = Row("titan_loop", "before")
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, row in rows.items():
            checkout = before if name == BEFORE else None
            taken[name].append(answer_of(pythons[row.engine], row, place, checkout, tokens=tokens))
    ms = {name: statistics.median(each["ms"] for each in found) for name, found in taken.items()}
    wanted = taken["titan_loop"][0]["tokens"]
    print(f"\nD {dim}, 4 layers, R {STEPS}, {tokens} tokens after {len(PROMPT)}\n")
    print("| | CPU ms a token (range) | over llama.cpp | tokens as ours |\n|---|---|---|---|")
    for name, found in taken.items():
        times = [each["ms"] for each in found]
        equal = sum(map(int.__eq__, found[0]["tokens"], wanted))
        over = f"{ms[name] / ms['llama.cpp']:.2f}" if "llama.cpp" in ms else ""
        spread = f"{ms[name]:.2f} ({min(times):.2f}-{max(times):.2f})"
        print(f"| {name} | {spread} | {over} | {equal} of {tokens} |")
    met = all(taken[name][0]["tokens"] == wanted for name in (*EXACT, BEFORE) if name in taken)
    for (one, other), aims in AIMS.items():
        if dim in aims and one in ms and other in ms:
            ratio, aim = ms[one] / ms[other], aims[dim]
            is_met = ratio <= -aim if aim < 0 else ratio >= aim
            bound = "at most" if aim < 0 else "at least"
            verdict = "met" if is_met else "missed"
            print(f"{one} over {other}: {ratio:.2f}, aim {bound} {abs(aim)}: {verdict}")
            met &= is_met
    if "onnxruntime" in rows:
        python, row = pythons["onnxruntime"], rows["onnxruntime"]
        shallow, deep = (
            answer_of(python, row, place, tokens=2, steps=steps)["mebibytes"] for steps in (1, 8)
        )
        ratio = deep / shallow
        print(f"onnxruntime, memory at R = 8 over R = 1: {ratio:.3f} of {shallow:.0f} MiB")
        met &= ratio <= 1.02
    return met


def main() -> int:
    """Measure every width."""
    parser = parser_of(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path(sys.prefix))
    parser.add_argument("--against", metavar="REVISION", help="its engine is a row, too")
    options = begin(parser, start=lambda: torch.set_num_threads(1))
    places = {name: options.environments / folder for name, folder in ENVIRONMENTS.items()}
    pythons = {name: place / "bin/python" for name, place in places.items()}
    for name, python in pythons.items():
        if not python.exists():
            print(f"no {name}: {python} is missing")
    pythons = {name: python for name, python in pythons.items() if python.exists()}
    pythons["titan_loop"] = Path(sys.executable)
    met = []
    with checkout_of(options.against) if options.against else nullcontext() as before:
        for dim in options.dims:
            with tempfile.TemporaryDirectory() as folder:
                asked = (Path(folder), options.tokens, options.rounds, before)
                met.append(measure(dim, pythons, *asked))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
