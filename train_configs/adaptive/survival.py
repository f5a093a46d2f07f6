"""The cost of halting each token at a threshold, for a model trained to mix its iterations.

windows ─┬─ mixture ─────► P    } KL(P ‖ P_τ), nats and top tokens at the labels,
         └─ survival τ ──► P_τ  } iterations of each layer
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from titan_loop.analysis.steps.findings import Findings, open_task
from titan_loop.data.load.held_out_windows import HeldOutWindows
from titan_loop.errors import UserError
from titan_loop.evaluation.exam import Exam
from titan_loop.families.adaptive.exit_policy import Survival
from titan_loop.models.decoder import LoopDecoder

_BATCH_WINDOWS = 16


@dataclass(frozen=True, kw_only=True)
class SurvivalError:
    """Means over labels, compared with the mixture.

    Attributes:
        threshold: τ; None for the mixture itself.
        iterations: Mean iterations of every layer; expected iterations for the mixture.
        nats: Negative log likelihood of the labels.
        divergence_nats: KL(P ‖ P_τ).
        same_token: Share of labels at which both predict the same token.
    """

    threshold: float | None
    iterations: list[float]
    nats: float
    divergence_nats: float
    same_token: float


@torch.no_grad()
def survival_errors(
    model: LoopDecoder, windows: HeldOutWindows, thresholds: Sequence[float]
) -> list[SurvivalError]:
    """Return the mixture's record, then one for every threshold.

    Args:
        model: A model whose layers loop, whole on this device.
        windows: Windows with at least one label among them.
        thresholds: τ, each in (0, 1].
    """
    policies = [None, *map(Survival, thresholds)]
    sums = [torch.zeros(3, dtype=torch.float64) for _ in policies]
    iterations = [torch.zeros(len(model.layers), dtype=torch.float64) for _ in policies]
    labels = 0
    for start in range(0, len(windows.labels), _BATCH_WINDOWS):
        rows = range(start, min(start + _BATCH_WINDOWS, len(windows.labels)))
        batch = windows.rows(rows, model.tok_embeddings.weight.device)
        valid_BL = batch.labels != IGNORE_INDEX
        labels += int(valid_BL.sum())
        mixed_TV: Tensor | None = None
        for number, policy in enumerate(policies):
            model.exit_policy = policy
            output = model(batch.input, batch.positions)
            log_prob_TV = model.readout(output.hidden_RBLD[0])[valid_BL].double().log_softmax(-1)
            mixed_TV = log_prob_TV if mixed_TV is None else mixed_TV
            nats = -log_prob_TV.gather(1, batch.labels[valid_BL].unsqueeze(1)).sum()
            divergence = (mixed_TV.exp() * (mixed_TV - log_prob_TV)).sum()
            same = (mixed_TV.argmax(-1) == log_prob_TV.argmax(-1)).sum()
            sums[number] += torch.stack([nats, divergence, same.double()]).cpu()
            iterations[number] += output.aux["iterations"][:, valid_BL].double().sum(1).cpu()
    model.exit_policy = None
    return [
        SurvivalError(
            threshold=None if policy is None else policy.threshold,
            iterations=(ran / labels).tolist(),
            nats=float(total[0] / labels),
            divergence_nats=float(total[1] / labels),
            same_token=float(total[2] / labels),
        )
        for policy, ran, total in zip(policies, iterations, sums, strict=True)
    ]


def survival(
    run: Path, *, thresholds: tuple[float, ...] = (0.5, 0.25, 0.1, 0.05), questions: int = 128
) -> Findings:
    """Replace each layer's mixture of iterations by halting at a threshold; show the cost.

    The questions come from the exam of the run's generated task. Writes
    evals/survival-step-N.json.

    Args:
        run: Run of the family adaptive, or its checkpoints/step-N.
        thresholds: Probabilities of going on below which a token halts.
        questions: Number of questions of each stratum.
    """
    loaded, task, strata = open_task(run, (), questions, use="generate")
    if "iterations" not in loaded.model.config.aux:
        raise UserError(
            f"{run} has no layers that loop; it needs family adaptive and model.max_iterations"
        )
    exam = Exam(
        task,
        questions,
        vocab_size=loaded.model.config.vocab_size,
        room=loaded.model.config.max_seq_len,
        strata=strata,
    )
    record, tables = {}, {}
    for name, windows in exam.windows.items():
        found = survival_errors(loaded.model, windows, thresholds)
        record[name] = [asdict(error) for error in found]
        rows = [[name, "iterations of each layer", "nats", "KL to the mixture", "same token"]]
        rows += [
            [
                "mixture" if error.threshold is None else f"survival:{error.threshold:g}",
                " ".join(f"{ran:.2f}" for ran in error.iterations),
                f"{error.nats:.4f}",
                f"{error.divergence_nats:.4f}",
                f"{error.same_token:.3f}",
            ]
            for error in found
        ]
        tables[f"Halting token by token: {name}"] = rows
    return Findings(
        name="survival",
        loaded=loaded,
        record={"questions": questions, "strata": record},
        tables=tables,
    )
