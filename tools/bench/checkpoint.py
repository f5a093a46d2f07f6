"""The cost of checkpoints: time lost by the training loop, bandwidth, hashing and verification.

    python tools/bench/checkpoint.py --size 53m --recurrent-steps 1 --seq-len 64 --batch 1

First, blocks of `--steps` training steps with one save after the first of them: none, `disabled`
(synchronous), `async` and `async_with_pinned_mem`, alternating within every round. Time lost is a
block minus the block without a save of the same round. Then, alternating again, save and load of
the same state (model and AdamW) against plain `torch.save` and `torch.load` of the same bytes, and
the two costs of hashing. Files are flushed to disk when written and dropped from the page cache
before they are read. One process, on a GPU if there is one. Refuses to run beside another load.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import titan_loop.compat  # noqa: F401  isort: skip  (before any torchtitan module)
import torch
import torch.distributed as dist
from conditions import begin, parser_of
from timing import spread
from torchtitan.components.checkpointer.base import OPTIMIZER, TRAIN_STATE
from torchtitan.config import CompileConfig
from torchtitan.tools import utils as titan_utils
from training_step import device, start

from titan_loop.checkpoint.loading import load_checkpoint
from titan_loop.checkpoint.manager import AsyncMode, LoopCheckpointManager
from titan_loop.checkpoint.manifest import file_records, find_damage, read_manifest
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.training.optimizers.container import LoopOptimizers

MODES: tuple[AsyncMode, ...] = ("disabled", "async", "async_with_pinned_mem")


def main() -> int:
    """Measure and print both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="quickstart")
    parser.add_argument("--recurrent-steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="training steps a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints are written; default: a temporary one")
    options = begin(parser, start=start)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        training = _Training(options)
        state = training.state()
        size_bytes = sum(tensor.nbytes for tensor in _tensors(state))
        print(f"{size_bytes / 1e9:.3f} GB of model and optimiser, written to {folder}\n")
        _measure_saves_while_training(training, Path(folder), options)
        _measure_bandwidth(training, Path(folder), options.rounds, size_bytes)
    dist.destroy_process_group()
    return 0


class _Training:
    """A model in training on one device, and nothing else of a trainer."""

    def __init__(self, options: argparse.Namespace) -> None:
        gate = options.recurrent_steps > 1
        size = OuroOptions(
            size=options.size, recurrent_steps=options.recurrent_steps, exit_gate=gate
        )
        self.model: LoopDecoder = build_decoder(size, max_seq_len=options.seq_len).to(device())
        self.optimizers = LoopOptimizers.Config().build(model_parts=[self.model])
        self.loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
        self.loss_fn.set_lm_head(self.model.lm_head)
        self.loss_fn.entropy_weight = 0.05
        shape = (options.batch, options.seq_len)
        vocabulary = self.model.config.vocab_size
        self.tokens, self.labels = torch.randint(vocabulary, (2, *shape), device=device())
        self.positions = torch.arange(options.seq_len, device=device()).expand(shape).contiguous()
        self.masks = self.model.get_attention_masks(self.positions)
        self.saved_steps = 0
        self.step(lambda: None)  # the optimiser's state exists after its first step

    def step(self, before_update: Callable[[], None]) -> None:
        """Do one step; a save that is still copying is waited for before weights change."""
        self.optimizers.zero_grad()
        hidden = self.model(self.tokens, self.positions, self.masks)
        loss, _ = self.loss_fn(hidden, self.labels, float(self.labels.numel()))
        loss.backward()
        before_update()
        self.optimizers.step()
        titan_utils.device_module.synchronize()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {**self.model.state_dict(), OPTIMIZER: self.optimizers.state_dict()}

    def manager(self, folder: Path, mode: AsyncMode) -> LoopCheckpointManager:
        """Return a manager of this state that saves whenever it is told to."""
        config = LoopCheckpointManager.Config(async_mode=mode, interval=1)
        return LoopCheckpointManager(
            config,
            dataloader=_NothingElse(),
            model_parts=[self.model],
            optimizers=self.optimizers,
            states={TRAIN_STATE: _NothingElse()},
            base_folder=str(folder / mode),
        )

    def save(self, manager: LoopCheckpointManager) -> Path:
        """Start a save; return its folder."""
        self.saved_steps += 1
        manager.save(self.saved_steps)
        return manager.path / f"step-{self.saved_steps}"


class _NothingElse:
    """A trainer and a loader with the least state that a manifest accepts."""

    at_stage_end = False

    def may_save(self) -> bool:
        return True

    def check_parent(self, state_dict: dict[str, Any]) -> None:
        pass

    def restart_average(self) -> None:
        pass

    def jump(self, windows: Iterable[tuple[int, int]]) -> None:
        pass

    def rank_files(self) -> dict[str, bytes]:
        return {}

    def load_rank_files(self, folder: Path) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"step": 0, "tokens": 0, "recurrent_steps": 1, "architecture": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def lineage(self) -> dict[str, Any]:
        return {}


def _measure_saves_while_training(
    training: _Training, folder: Path, options: argparse.Namespace
) -> None:
    managers = {mode: training.manager(folder, mode) for mode in MODES}

    def block(manager: LoopCheckpointManager | None) -> tuple[float, float]:
        start = time.perf_counter()
        for number in range(options.steps):
            training.step(manager.maybe_wait_for_staging if manager else lambda: None)
            if manager and number == 0:
                training.save(manager)
        trained = time.perf_counter() - start
        if manager:
            manager.maybe_wait_for_saving()
        return trained, time.perf_counter() - start - trained

    for manager in (None, *managers.values()):  # first saves allocate the buffers
        block(manager)
    plain: list[float] = []
    lost: dict[str, list[float]] = {mode: [] for mode in MODES}
    left: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(options.rounds):
        plain.append(block(None)[0])
        for mode, manager in managers.items():
            trained, waited = block(manager)
            lost[mode].append(trained - plain[-1])
            left[mode].append(waited)
    step_seconds = statistics.median(plain) / options.steps
    print(f"a step without saves: {step_seconds:.3f} s; {options.steps} steps a save")
    print("save | s lost by training (range) | as steps | s still writing after the block")
    for mode in MODES:
        median = statistics.median(lost[mode])
        print(
            f"{mode} | {spread(lost[mode])} | {median / step_seconds:.2f} | "
            f"{statistics.median(left[mode]):.2f}"
        )
    print()
    for manager in managers.values():
        manager.close()


def _measure_bandwidth(training: _Training, folder: Path, rounds: int, size_bytes: int) -> None:
    manager = training.manager(folder / "bandwidth", "disabled")
    state = training.state()
    plain = folder / "plain.pt"
    checkpoint = training.save(manager)
    torch.save(state, plain)

    def save() -> None:
        nonlocal checkpoint
        checkpoint = training.save(manager)

    def plain_save() -> None:
        with plain.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def verify() -> None:
        damage = find_damage(checkpoint, read_manifest(checkpoint)["files"])
        assert not damage, damage

    # In this order: each reads what the last round's saves wrote.
    actions: dict[str, Callable[[], Any]] = {
        "torch.save, fsync": plain_save,
        "save: DCP, fsync, hashes, manifest": save,
        "hashes of the files just written": lambda: file_records(checkpoint),
        "torch.load": lambda: torch.load(plain, map_location="cpu", weights_only=True),
        "load, sizes only": lambda: load_checkpoint(state, checkpoint, group=None),
        "verification of hashes before a load": verify,
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            if name in ("torch.load", "load, sizes only", "verification of hashes before a load"):
                _drop_from_page_cache([plain, *checkpoint.iterdir()])
            start = time.perf_counter()
            action()
            titan_utils.device_module.synchronize()
            if number:  # the first round is warm-up
                seconds[name].append(time.perf_counter() - start)
    print("action | GB/s of the median | s (range) | of torch's")
    for name, values in seconds.items():
        median = statistics.median(values)
        counterpart = "torch.load" if "load" in name else "torch.save, fsync"
        ratio = median / statistics.median(seconds[counterpart])
        print(f"{name} | {size_bytes / median / 1e9:.2f} | {spread(values)} | {ratio:.2f}")
    manager.close()


def _drop_from_page_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


if __name__ == "__main__":
    raise SystemExit(main())
