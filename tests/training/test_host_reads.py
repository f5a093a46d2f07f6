"""How often a training step makes the host wait for the device: not once, but where it is logged.

What is read in between is the verdict on the step before.

On CUDA every value that Python reads from a tensor waits for all kernels before it, and so does
every copy to the device that is not told otherwise. On CPU nothing waits, but the reads and copies
are the same, so they are counted here.
"""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import titan_loop
from tests.support.tiny import tiny_config, train_run
from titan_loop.training.trainer import LoopTrainer
from titan_loop.training.verdict import StepVerdict

PACKAGE = f"{Path(titan_loop.__file__).parent}/"  # not any folder of this name: a clone has it, too
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
# Their result's size or value is needed on the host.
READING_OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"}


class HostReads(TorchDispatchMode):
    """Records where values leave their tensors, by method and by operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
        # On a CPU the device says nothing: each of these that may copy to one counts.
        copies = {
            (torch.Tensor, "to"): lambda args, device=None, **_: device or (args and args[0]),
            (torch.Tensor, "cuda"): lambda args, **_: "cuda",
            (torch.Tensor, "copy_"): lambda args, **_: "cuda",
            (torch, "tensor"): lambda args, device=None, **_: device,
            (torch, "as_tensor"): lambda args, device=None, **_: device,
        }
        for (owner, name), target in copies.items():
            method = self._counted_copy(getattr(owner, name), target)
            monkeypatch.setattr(owner, name, method)

    def _counted(self, method: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            outermost, self._inside = not self._inside, True
            try:
                if outermost:
                    self._record()
                return method(tensor, *args, **kwargs)
            finally:
                self._inside = not outermost

        return read

    def _counted_copy(self, method: Any, target: Callable[..., Any]) -> Any:
        def copy(given: Any, *args: Any, **kwargs: Any) -> Any:
            device = target(args, **kwargs)
            ours = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
            waits = isinstance(device, torch.device | str) and not kwargs.get("non_blocking")
            if ours and waits:
                self._record()
            return method(given, *args, **kwargs)

        return copy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reading = func.namespace == "aten" and func._schema.name[6:] in READING_OPERATORS
        if reading and not self._inside:
            self._record()
        return func(*args, **(kwargs or {}))

    def _record(self) -> None:
        # The place in the package, or the caller's if there is none.
        stack = traceback.extract_stack()[:-2]
        ours = [frame for frame in stack if frame.filename.startswith(PACKAGE)] or stack
        self.found.append(f"{ours[-1].filename.removeprefix(PACKAGE)}:{ours[-1].name}")


@pytest.fixture
def reads_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    steps: list[list[str]] = []
    train_step = LoopTrainer.train_step

    def counted(self: LoopTrainer, data_iterator: Any) -> None:
        with monkeypatch.context() as patch, HostReads(patch) as reads:
            train_step(self, data_iterator)
        steps.append(reads.found)

    monkeypatch.setattr(LoopTrainer, "train_step", counted)
    return steps


def test_between_logging_steps_the_host_reads_the_verdict_on_the_step_before_and_nothing_else(
    alone: None,
    source: Path,
    tmp_path: Path,
    reads_of_steps: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[StepVerdict] = []
    read: list[int] = []
    make, look = StepVerdict.__init__, StepVerdict.read

    def numbered(self: StepVerdict, flags: torch.Tensor) -> None:
        made.append(self)
        make(self, flags)

    def noted(self: StepVerdict) -> tuple[bool, bool]:
        read.append(len(made) - 1 - made.index(self))  # steps it is behind
        return look(self)

    monkeypatch.setattr(StepVerdict, "__init__", numbered)
    monkeypatch.setattr(StepVerdict, "read", noted)
    config = tiny_config(source, tmp_path, steps=6)
    config.metrics.log_freq = 5
    config.checkpoint.interval = 100
    config.training.local_batch_size = 4  # two micro-batches
    train_run(config)
    # Windows are put together on the host, from tensors that are not on a device yet.
    on_host = ("data/", "models/readout.py:")  # and the head copies exponentials over its logits
    steps = [[read for read in step if not read.startswith(on_host)] for step in reads_of_steps]
    assert len(steps) == 6
    for step in steps[1:4]:  # 1, 5 and 6 are logged
        assert set(step) <= {"training/verdict.py:read"}, step
    assert read == [0, 1, 1, 1, 0, 0]
    assert any(read == "training/metrics.py:step_record" for read in steps[4])
