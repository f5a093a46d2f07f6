"""Gradients of a layer's copies, and training after upcycling under every moments policy.

    python tools/bench/upcycling.py runs/miniature/1a --layers 8 --recurrent-steps 2

First: per tensor of a layer, E[g_c²] of a copy over E[g²] of the shared layer, and E[g_c] projected
on E[g], medians; the old model runs R steps, the new one those asked for, on the same batches. Then
the new model trains on from every policy's moments at a constant learning rate, on the same
batches; losses are those of the last recurrent step, minus `duplicate`'s. Nothing is timed.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

import titan_loop.compat  # isort: skip  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor

from titan_loop.checkpoint.model import load_model
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.checkpoint.upcycling import Mode, Moments, Upcycling, upcycle_checkpoint
from titan_loop.data.load.loader import WindowLoader
from titan_loop.models.decoder import LoopDecoder
from titan_loop.objectives.expected_loss import ExpectedLoss, expected_loss
from titan_loop.runs.saved_run import SavedRun

Batch = tuple[dict[str, Tensor], Tensor]
SEED = 1  # other windows than the run's own order begins with
SPANS = ((0, 1), (1, 5), (5, 10), (10, 20), (20, 40))


def main() -> int:
    """Measure one mode and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="a run with exit gate and AdamW, or a checkpoint of it")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--recurrent-steps", type=int, required=True, help="of the new model")
    parser.add_argument("--mode", choices=get_args(Mode), default="stacked")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--entropy-weight", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    print(" ".join(sys.argv), f"| torch {torch.__version__}")
    run = SavedRun.open(options.run)
    checkpoint = run.checkpoint()
    loader = WindowLoader.Config(mixture=run.mixture, seed=SEED).build(
        dp_world_size=1, dp_rank=0, seq_len=run.seq_len, local_batch_size=options.batch
    )
    batches = [loader.read_step(options.batch)[0] for _ in range(options.steps)]
    loader.close()
    parent = load_model(checkpoint.path, run.model_options, max_seq_len=run.seq_len)
    parent.recurrent_steps = checkpoint.recurrent_steps
    deeper = replace(run.model_options, n_layers=options.layers)
    losses: dict[str, list[float]] = {}
    for moments in get_args(Moments):
        upcycling = Upcycling(options.layers, options.mode, moments)
        with tempfile.TemporaryDirectory() as folder:
            child = Path(folder) / "child"
            upcycle_checkpoint(checkpoint.path, child, upcycling)
            model = load_model(child, deeper, max_seq_len=run.seq_len)
            model.recurrent_steps = options.recurrent_steps
            if not losses:
                layers = upcycling.sources(checkpoint.manifest["trainer"]["architecture"])
                _print_gradients(options, parent, model, layers, batches)
            losses[moments] = _train(options, model, CheckpointReader(child), batches)
    _print_losses(losses)
    return 0


def _loss(options: argparse.Namespace, model: LoopDecoder, batch: Batch) -> ExpectedLoss:
    inputs, labels = batch
    output = model(inputs["input"], inputs["positions"])
    return expected_loss(
        model.lm_head,
        output.hidden_RBLD,
        torch.stack(output.exit_logit_RBL),
        labels,
        entropy_weight=options.entropy_weight,
        valid_tokens=float((labels >= 0).sum()),
    )


def _gradients(
    options: argparse.Namespace, model: LoopDecoder, batches: list[Batch]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean gradient and mean square of every parameter of the layers."""
    parameters = dict(model.layers.named_parameters())
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in parameters.items()}
    for batch in batches:
        model.zero_grad()
        _loss(options, model, batch).loss.backward()
        for name, (first, second) in moments.items():
            gradient = parameters[name].grad
            assert gradient is not None
            first += gradient / len(batches)
            second += gradient.square() / len(batches)
    model.zero_grad()
    return moments


def _print_gradients(
    options: argparse.Namespace,
    parent: LoopDecoder,
    child: LoopDecoder,
    layers: list[int],
    batches: list[Batch],
) -> None:
    shared, copies = (_gradients(options, model, batches[:16]) for model in (parent, child))
    rows = []
    for name, (first_copy, second_copy) in copies.items():
        index, rest = name.split(".", 1)
        first, second = shared[f"{layers[int(index)]}.{rest}"]
        projection = (first_copy * first).sum() / first.square().sum()
        rows.append((second_copy.sum() / second.sum(), projection))
    second, first = torch.tensor(rows).T
    print(
        f"a copy's E[g²] / the shared layer's: median {second.median():.2f} "
        f"({second.quantile(0.1):.2f}-{second.quantile(0.9):.2f}); E[g]: median "
        f"{first.median():.2f} ({first.quantile(0.1):.2f}-{first.quantile(0.9):.2f})"
    )


def _train(
    options: argparse.Namespace, model: LoopDecoder, reader: CheckpointReader, batches: list[Batch]
) -> list[float]:
    """Train with the checkpoint's moments; return the last step's cross entropy, each batch."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            field: reader.read(f"optimizer.state.{name}.{field}")
            for field in ("exp_avg", "exp_avg_sq", "step")
        }
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        result = _loss(options, model, batch)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(result.ce_RBL[-1].mean()))
    return losses


def _print_losses(losses: dict[str, list[float]]) -> None:
    spans = [(start, end) for start, end in SPANS if end <= len(losses["duplicate"])]
    print("moments | " + " | ".join(f"steps {start + 1}-{end}" for start, end in spans))
    for moments, series in losses.items():
        excess = [a - b for a, b in zip(series, losses["duplicate"], strict=True)]
        cells = (f"{sum(excess[a:b]) / (b - a):+.3f}" for a, b in spans)
        print(f"{moments} | " + " | ".join(cells), f"| largest {max(excess):+.3f}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
