"""`tools/bench/low_precision.py`: its table, its plot, and the lines of its faults."""

import importlib
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder

TINY = ["--beside-load", "--size", "debugmodel", "--seq-len", "32", "--recurrent-steps", "3"]


@pytest.fixture
def bench(monkeypatch) -> Any:
    monkeypatch.syspath_prepend("tools/bench")
    return importlib.import_module("low_precision")


def run(bench, monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["low_precision.py", *TINY, *words])
    return bench.main()


def test_an_error_above_the_threshold_names_precision_step_and_layer(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert run(bench, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("No error is above 20 %, or grows faster than r\n")
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \|$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert run(bench, monkeypatch, "--threshold", "0.002") == 1
    (line,) = re.findall(r"^bf16: .*$", capsys.readouterr().out, re.MULTILINE)
    largest = max(float(error) for row in rows for error in row[1:])
    assert line.endswith(" after step 3, layer 2, above 0.2 %")
    assert float(line.split()[4]) == pytest.approx(largest, abs=0.06)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([[0.1, 0.1], [0.1, 0.2]], []),
        ([[0.1, 0.3], [0.1, 0.2]], ["x: the error is 30.0 % after step 1, layer 2, above 20 %"]),
        ([[0.1, 0.1], [np.nan, 0.2]], ["x: the error is nan % after step 2, layer 1, above 20 %"]),
        ([[0.01, 0.01], [0.01, 0.021]], ["x: the error grows 2.1 times in 2 steps"]),
    ],
)
def test_faults(bench, errors: list[list[float]], said: list[str]):
    assert bench.faults_of("x", np.array(errors), 0.2) == said


@pytest.mark.float8
def test_mxfp8_has_a_scale_for_every_32_inputs(bench):
    pytest.importorskip("torchao")
    model = build_decoder(OuroOptions(size="debugmodel"), max_seq_len=32)
    layer = bench.precisions(model)["mxfp8"](model).layers["0"].feed_forward.w2
    states = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    states[:, ::32] *= 1e4  # without scales of its own, a group would lose its small numbers

    def rounded(values: torch.Tensor) -> torch.Tensor:
        groups = values.reshape(-1, 32)
        scales = (groups.abs().amax(1, keepdim=True) / 448).log2().ceil().exp2()
        return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).reshape(values.shape)

    with torch.no_grad():
        expected = rounded(states) @ rounded(layer.weight).T
        assert torch.equal(layer(states), expected)
        assert not torch.allclose(expected, states @ layer.weight.T, rtol=1e-3)
