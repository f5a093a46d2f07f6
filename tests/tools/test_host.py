"""`tools/bench/host.py`: a step of ours dispatches no more than plain PyTorch's."""

import importlib
from argparse import Namespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]


@pytest.mark.usefixtures("alone")
def test_a_step_calls_no_more_operators_and_products_than_plains(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend("tools/bench")
    host = importlib.import_module("host")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    shape = {"dim": 64, "layers": 8, "tokens": 16, "recurrent_steps": 4, "no_compile": True}
    counted = {}
    for name, step in host.steps_of(Namespace(**shape)).items():
        step()
        counted[name] = host.count_calls(step)
    plain, ours = counted["plain"], counted["fp32"]
    assert ours.all <= plain.all
    assert ours.products <= plain.products + 20  # of the streamed head
    assert counted["bf16"].all <= 1.25 * plain.all  # a norm in bf16 on a CPU is seven operators
    assert counted["bf16"].products <= plain.products + 20
