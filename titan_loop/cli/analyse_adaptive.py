"""`titan-loop analyse survival RUN`: layers that loop, with tokens halted one by one."""

from dataclasses import asdict
from pathlib import Path

from titan_loop.errors import UserError


def survival(
    run: Path, *, thresholds: tuple[float, ...] = (0.5, 0.25, 0.1, 0.05), questions: int = 128
) -> None:
    """Replace each layer's mixture of iterations by halting at a threshold; show what that costs.

    Asks the exam of the run's generated task. Writes evals/survival-step-N.json.

    Args:
        run: Run of the family adaptive, or its checkpoints/step-N.
        thresholds: Probabilities of going on below which a token halts.
        questions: Number of questions of each stratum.
    """
    from titan_loop.evaluation.analysed_run import open_task, save_analysis
    from titan_loop.evaluation.exam import Exam
    from titan_loop.evaluation.survival import survival_errors
    from titan_loop.tables import columns

    loaded, task, strata = open_task(run, (), questions, use="generate")
    if "iterations" not in loaded.model.config.aux:
        raise UserError(f"{run} has no layers that loop; this analysis is of the family adaptive")
    exam = Exam(
        task,
        questions,
        vocab_size=loaded.model.config.vocab_size,
        room=loaded.model.config.max_seq_len,
        strata=strata,
    )
    record = {}
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
        print("\n".join(columns(rows)) + "\n")
    print(save_analysis(loaded, "survival", {"questions": questions, "strata": record}))


VERBS = {"survival": survival}
