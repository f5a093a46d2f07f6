"""Prompts at fewer recurrent steps than their continuations: the loss of the continuations.

    window = prompt ─ P steps, deeper steps see the keys of step P ─► cache
             continuation, from the prompt's last token on ─ R steps ─► nats

Every window is read as one text from position 0, as an engine reads a prompt.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_loop.analysis.drawing import COLORS, Axes, draw_panels
from titan_loop.analysis.steps.findings import Figure, Findings, chosen_steps
from titan_loop.data.labels import IGNORED
from titan_loop.errors import require_at_least
from titan_loop.evaluation.bits_per_byte import bits_per_byte, paired_difference
from titan_loop.evaluation.intervals import Interval
from titan_loop.evaluation.window_scores import open_run
from titan_loop.inference.cache import LoopCache, cache_strategy
from titan_loop.inference.loading import load_checkpoint
from titan_loop.inference.stack import Stack

_BATCH = 8


def analyse_prefill(
    run: Path, *, windows: int = 64, recurrent_steps: int | None = None
) -> Findings:
    """Score continuations of held-out text after prompts that ran fewer recurrent steps.

    The first half of a window is its prompt.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        windows: Held-out windows per source.
        recurrent_steps: R of the continuations; default as in training.
    """
    require_at_least(1, windows=windows)
    loaded = load_checkpoint(run, use="generate")
    steps = chosen_steps(recurrent_steps, loaded)
    stack = Stack(loaded.model)
    rows = [["source", "prefill steps", "bits per byte", "above all steps"]]
    results: dict[str, float] = {}
    curves: dict[str, list[Interval]] = {}
    for source, found in open_run(loaded.run, count=windows).items():
        half = found.input.shape[1] // 2
        n_bytes = found.label_bytes[:, half - 1 :].sum(1).numpy()
        nats = {
            prefill: continuation_nats(stack, found.input, found.labels, half, prefill, steps)
            for prefill in range(1, steps + 1)
        }
        for prefill, nats_W in nats.items():
            bits = bits_per_byte(nats_W, n_bytes)
            more = paired_difference(nats_W, nats[steps], n_bytes)
            curves.setdefault(source, []).append(more)
            spread = f"{more.value:+.4f} [{more.low:+.4f}, {more.high:+.4f}]"
            rows.append([source, str(prefill), f"{bits:.4f}", spread])
            results[f"prefill/{source}/bits_per_byte/steps:{prefill}"] = bits
    figure = Figure(
        "Prompts at fewer steps",
        "Increase in continuations' bits per byte over prompts at all steps, with 95 % intervals.",
        partial(_draw, curves),
    )
    return Findings(
        name="prefill",
        loaded=loaded,
        record={"windows": windows, "recurrent_steps": steps},
        tables={"Continuations after short prefills": rows},
        figures={"prefill.png": figure},
        results=results,
    )


@torch.inference_mode()
def continuation_nats(
    stack: Stack, tokens_WL: Tensor, labels_WL: Tensor, prompt: int, prefill: int, steps: int
) -> np.ndarray:
    """Return the nats of each window's labels from the prompt's last token on, (W,)."""
    nats = []
    for tokens_BL, labels_BL in zip(
        tokens_WL.to(stack.device).split(_BATCH),
        labels_WL.to(stack.device).split(_BATCH),
        strict=True,
    ):
        cache = _prefilled(stack, tokens_BL[:, :prompt], tokens_BL.shape[1], prefill, steps)
        logits_BLV = _read(stack, tokens_BL[:, prompt - 1 :], prompt - 1, cache, steps)
        nats_BL = torch.nn.functional.cross_entropy(
            logits_BLV.flatten(0, 1).float(),
            labels_BL[:, prompt - 1 :].flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        nats.append(nats_BL.view(len(tokens_BL), -1).double().sum(1).cpu().numpy())
    return np.concatenate(nats)


def _prefilled(
    stack: Stack, prompt_BL: Tensor, capacity: int, prefill: int, steps: int
) -> LoopCache:
    rows, length = prompt_BL.shape
    cache = stack.make_cache(cache_strategy("full"), steps=steps, rows=rows, capacity=capacity)
    lengths_B = torch.full((rows,), length, device=stack.device)
    visit = cache.admit([length] * rows)
    context = stack.prompt_context(prompt_BL, lengths_B, visit)
    state = None
    for step in range(1, prefill + 1):
        state = stack.step(state, prompt_BL, [step] * rows, context, reads=step == prefill)
    cache.leave_prompt(0, length, prefill)
    return cache


def _read(stack: Stack, tokens_BL: Tensor, first: int, cache: LoopCache, steps: int) -> Tensor:
    """Return the logits after R steps of tokens at the positions from `first` on."""
    rows, length = tokens_BL.shape
    positions_L = torch.arange(first, first + length, device=stack.device)
    context = stack.token_context(positions_L.expand(rows, length), cache)
    state = None
    for step in range(1, steps + 1):
        state = stack.step(state, tokens_BL, [step] * rows, context, reads=step == steps)
    assert state is not None
    return stack.readout(state.read_BLD)


def _draw(curves: dict[str, list[Interval]], path: Path) -> Path:
    def draw(axes: Axes, source: str) -> None:
        value, low, high = np.array(curves[source]).T
        steps = np.arange(1, len(value) + 1)
        axes.errorbar(steps, value, yerr=[value - low, high - value], fmt="o-", color=COLORS[0])
        axes.axhline(0.0, color="0.7", linewidth=0.8)
        axes.set_xlabel("recurrent steps of the prompt")

    most = max(values[0].value for values in curves.values())
    title = f"After prompts at one step, continuations cost at most {most:.3f} bits per byte more"
    return draw_panels([*curves], draw, path, title=title, label="increase in bits per byte")
