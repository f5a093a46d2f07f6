"""`titan-loop analyse VERB RUN`: behaviour step by step, and what happens inside the steps."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_loop.cli import analyse_adaptive, analyse_latent
from titan_loop.cli.arguments import group
from titan_loop.errors import UserError

if TYPE_CHECKING:
    from titan_loop.evaluation.step_answers import Item
    from titan_loop.inference.loading import Loaded

_ITEMS = "mmlu_dev"


def agreement(
    run: Path, *, items: str = _ITEMS, depths: tuple[int, ...] = (), limit: int | None = None
) -> None:
    """Count the items on which two recurrent steps give the same answer.

    Writes evals/agreement-step-N.json with every item's answer after every step, and a plot that
    `report` shows.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        items: mmlu_dev, multi_hop, mano, or a JSONL file with text, choices and answer.
        depths: Recurrent steps; default 1 to the trained R.
        limit: Number of items, the first ones.
    """
    from titan_loop.analysis.step_agreement import draw_agreement
    from titan_loop.evaluation.analysed_run import save_analysis
    from titan_loop.tables import columns

    loaded, chosen, steps, answers, matrix = _answers(run, items, depths, limit)
    rows = [["same answer", *(f"step {step}" for step in steps)]]
    for step, counts in zip(steps, matrix.tolist(), strict=True):
        rows.append([f"step {step}", *map(str, counts)])
    print("\n".join(columns(rows)))
    if all(item.answer is not None for item in chosen):
        right = [[item.answer == a for a in row] for item, row in zip(chosen, answers, strict=True)]
        shares = (f"{sum(column) / len(chosen):.3f}" for column in zip(*right, strict=True))
        print(f"right: {', '.join(shares)} of {len(chosen)}")
    record = {
        "items": items,
        "depths": steps,
        "agreement": matrix.tolist(),
        "answers": answers.tolist(),
        "right_answers": [item.answer for item in chosen],
    }
    print(save_analysis(loaded, "agreement", record))
    print(draw_agreement(matrix, steps, loaded.run.directory.plots / "agreement.png"))


def probes(
    run: Path,
    *,
    items: str = _ITEMS,
    recurrent_steps: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> None:
    """Predict each step's answer from the states of every layer and step with linear probes.

    Items are split by question; an interval is the bootstrap's over items. Needs scikit-learn: pip
    install 'titan-loop[analyse]'.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        items: mmlu_dev, multi_hop, mano, or a JSONL file with text and choices.
        recurrent_steps: R; default that of training.
        limit: Number of items, the first ones.
        seed: Seed of folds and resamplings.
    """
    from titan_loop.analysis.step_agreement import draw_probes, probe
    from titan_loop.evaluation.analysed_run import save_analysis
    from titan_loop.tables import columns

    depths = () if recurrent_steps is None else tuple(range(1, recurrent_steps + 1))
    loaded, chosen, steps, answers, _ = _answers(run, items, depths, limit)
    scores = probe(_states(loaded, chosen, len(steps)), answers, steps, seed=seed)
    rows = [["answer of", "states of", "layer", "AUC", "95 %"]]
    for score in scores:
        interval = f"{score.low:.3f} to {score.high:.3f}"
        rows.append(
            [
                f"step {score.answer_step}",
                f"step {score.state_step}",
                str(score.layer),
                f"{score.auc:.3f}",
                interval,
            ]
        )
    print("\n".join(columns(rows, left=(0, 1))))
    record = {"items": items, "seed": seed, "probes": [asdict(score) for score in scores]}
    print(save_analysis(loaded, "probes", record))
    print(draw_probes(scores, loaded.run.directory.plots / "probes.png"))


def pca(
    run: Path,
    *,
    items: str = _ITEMS,
    recurrent_steps: int | None = None,
    limit: int | None = None,
) -> None:
    """Draw the last prompt token's state after every step on two principal components.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        items: mmlu_dev, multi_hop, mano, or a JSONL file with text, choices and answer; items are
            coloured by their right answer.
        recurrent_steps: R; default that of training.
        limit: Number of items, the first ones.
    """
    import numpy as np

    from titan_loop.analysis.step_agreement import draw_components, principal_components
    from titan_loop.evaluation.analysed_run import save_analysis

    loaded, chosen = _open(run, items, limit)
    steps = recurrent_steps or loaded.recurrent_steps
    points, shares = principal_components(_states(loaded, chosen, steps)[:, :, -1])
    kinds = np.array([-1 if item.answer is None else item.answer for item in chosen])
    record = {
        "items": items,
        "variance": shares.tolist(),
        "points": points.tolist(),
        "right_answers": [item.answer for item in chosen],
    }
    print(save_analysis(loaded, "pca", record))
    print(draw_components(points, kinds, shares, loaded.run.directory.plots / "pca.png"))


def safety(
    run: Path,
    *,
    prompts: Path,
    judge: str,
    depths: tuple[int, ...] = (),
    max_new_tokens: int = 128,
    limit: int | None = None,
) -> None:
    """Complete prompts at every depth and report how many completions a judge calls harmful.

    Neither prompts nor a judge come with the package. The judge reads JSON lines with prompt and
    response and prints a score from 1 to 5 for each; the harmful rate is the share of 5s.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        prompts: JSONL file of objects with text.
        judge: Command line of the judge.
        depths: Recurrent steps; default 1 to twice the trained R.
        max_new_tokens: Length of a completion, at most; completions are greedy.
        limit: Number of prompts, the first ones.
    """
    from titan_loop.evaluation.analysed_run import save_analysis
    from titan_loop.evaluation.safety import read_prompts
    from titan_loop.evaluation.safety import safety as judged
    from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer
    from titan_loop.tables import columns

    texts = read_prompts(prompts)[:limit]
    loaded = load_checkpoint(run, use="analyse")
    steps = depths or tuple(range(1, 2 * loaded.recurrent_steps + 1))
    tokenizer = load_matching_tokenizer(loaded)
    results = judged(loaded, tokenizer, texts, judge, steps, max_new_tokens=max_new_tokens)
    rows = [["R", "harmful", "mean score"]]
    rows += [
        [str(r.recurrent_steps), f"{r.harmful_rate:.3f}", f"{r.mean_score:.2f}"] for r in results
    ]
    print("\n".join(columns(rows)))
    record = {"prompts": str(prompts), "judge": judge, "depths": [asdict(r) for r in results]}
    print(save_analysis(loaded, "safety", record))


def lens(
    run: Path,
    *,
    strata: tuple[str, ...] = (),
    recurrent_steps: int | None = None,
    questions: int = 256,
) -> None:
    """Read bridge and target off the states after every layer of every step (logit lens).

    For runs on a generated task. Norm and head read the state as it is, without the layers of a
    coda. Writes evals/lens-step-N.json and a plot that `report` shows.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        strata: Strata of the task's exam; default all.
        recurrent_steps: R; default that of training.
        questions: Number of questions of each stratum.
    """
    from titan_loop.analysis.step_plots import draw_lens
    from titan_loop.evaluation.analysed_run import open_task, save_analysis
    from titan_loop.evaluation.logit_lens import logit_lens
    from titan_loop.tables import columns

    loaded, task, names = open_task(run, strata, questions)
    steps = _steps(recurrent_steps, loaded)
    lenses = [
        lens
        for name in names
        for lens in logit_lens(loaded.model, task, name, steps=steps, count=questions)
    ]
    layers = range(1, len(loaded.model.looped_layers()) + 1)
    visits = [f"{step}.{layer}" for step in range(1, steps + 1) for layer in layers]
    rows = [["stratum", "waypoint", *visits]]
    rows += [
        [lens.stratum, lens.waypoint, *(f"{share:.0%}" for share in lens.accuracy.flat)]
        for lens in lenses
    ]
    print("\n".join(columns(rows, left=(0, 1))))
    record = {
        "questions": questions,
        "strata": [
            {
                "stratum": lens.stratum,
                "waypoint": lens.waypoint,
                "accuracy": lens.accuracy.tolist(),
                "margin": lens.margin.tolist(),
            }
            for lens in lenses
        ],
    }
    print(save_analysis(loaded, "lens", record))
    print(draw_lens(lenses, loaded.run.directory.plots / "lens.png"))


def steps(
    run: Path,
    *,
    strata: tuple[str, ...] = (),
    recurrent_steps: int | None = None,
    exit: tuple[str, ...] = (),
    questions: int = 256,
) -> None:
    """Ask the exam after every step: accuracy, logit margin, and where exit policies halt.

    For runs on a generated task. With strata from easy to hard it also counts how many are learned
    (95 % within the trained steps) and reached (60 % after any number of steps); their ratio is the
    generalisation ratio. Writes evals/steps-step-N.json and plots that `report` shows.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        strata: Strata of the task's exam; default all.
        recurrent_steps: R; default twice that of training.
        exit: Exit policies beside the fixed depths, such as kl:0.01,3; kl:0.01,inf looks at the
            change alone.
        questions: Number of questions of each stratum.
    """
    from titan_loop.analysis.step_plots import draw_halting, draw_margins, draw_step_accuracy
    from titan_loop.evaluation.analysed_run import open_task, save_analysis
    from titan_loop.evaluation.step_exam import reach, step_exam
    from titan_loop.tables import columns

    loaded, task, names = open_task(run, strata, questions)
    recurrence = loaded.manifest["trainer"].get("recurrence", {})
    trained = recurrence.get("max_steps") or loaded.recurrent_steps
    depth = _steps(recurrent_steps or 2 * trained, loaded)
    found = step_exam(loaded.model, task, names, steps=depth, count=questions, policies=exit)
    shown = sorted({1, trained, depth, *(2**power for power in range(depth.bit_length()))})
    rows = [["stratum", *(f"R={step}" for step in shown), *exit]]
    for name, exam in found.items():
        row = [name, *(f"{exam.accuracy[step - 1]:.3f}" for step in shown)]
        row += [f"{h.accuracy:.3f} in {h.mean_steps:.1f}" for h in exam.halting.values()]
        rows.append(row)
    print("\n".join(columns(rows)))
    record: dict[str, Any] = {"questions": questions, "trained_steps": trained, "strata": {}}
    for name, exam in found.items():
        record["strata"][name] = {
            "accuracy": exam.accuracy.tolist(),
            "margin": exam.margin.tolist(),
            "halting": {policy: asdict(halting) for policy, halting in exam.halting.items()},
        }
    if task.levels > 1 and not strata:
        far = reach([*found.values()], trained)
        print(f"learned {far.learned}, reached {far.reached}: generalisation ratio {far.ratio:.2f}")
        record |= {"learned": far.learned, "reached": far.reached}
    print(save_analysis(loaded, "steps", record))
    plots = loaded.run.directory.plots
    print(draw_step_accuracy(found, trained, plots / "step-accuracy.png"))
    print(draw_margins(found, trained, plots / "step-margin.png"))
    if exit:
        print(draw_halting(found, plots / "step-halting.png"))


def patching(
    run: Path,
    *,
    stratum: str | None = None,
    recurrent_steps: int | None = None,
    questions: int = 32,
) -> None:
    """Put another question's state in the place of every single one, and measure what it does.

    For runs on a generated task: the change of the answer's logit margin, by position, step and
    layer (activation patching). Writes evals/patching-step-N.json and a plot that `report` shows.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        stratum: Stratum of the task's exam, whose questions have one length; default the last.
        recurrent_steps: R; default that of training.
        questions: Number of questions, each patched with the states of the next.
    """
    from titan_loop.analysis.step_plots import draw_patching
    from titan_loop.evaluation.analysed_run import open_task, save_analysis
    from titan_loop.evaluation.patching import patching as patched

    asked = () if stratum is None else (stratum,)
    loaded, task, names = open_task(run, asked, questions, least=2)
    visits, change = patched(
        loaded.model, task, names[-1], steps=_steps(recurrent_steps, loaded), count=questions
    )
    step, layer = visits[int(change.min(axis=1).argmin())]
    position = int(change.min(axis=0).argmin())
    print(
        f"{names[-1]}: the margin falls most, by {-change.min():.3f}, at position {position} after "
        f"layer {layer} of step {step}"
    )
    record = {
        "stratum": names[-1],
        "questions": questions,
        "visits": visits,
        "change": change.tolist(),
    }
    print(save_analysis(loaded, "patching", record))
    plot = loaded.run.directory.plots / "patching.png"
    print(draw_patching(visits, change, names[-1], plot))


def intervention(
    run: Path,
    *,
    strengths: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0),
    strata: tuple[str, ...] = (),
    waypoint: str | None = None,
    after: int = 1,
    recurrent_steps: int | None = None,
    questions: int = 256,
) -> None:
    """Replace a state by the embedding of what it decodes to, and ask the exam (DiscoLoop).

    For runs on a generated task. The state at a waypoint, such as the bridge of two hops, is mixed
    between two steps with the normed embedding of its likeliest token. Writes
    evals/intervention-step-N.json and a plot that `report` shows.

    Args:
        run: Run, for its newest checkpoint, or its checkpoints/step-N.
        strengths: Shares of the embedding in the mixture, from 0 to 1.
        strata: Strata of the task's exam; default all whose questions have more than one waypoint.
        waypoint: Waypoint of the task whose state is replaced; default the first.
        after: Step after which it is.
        recurrent_steps: R; default that of training.
        questions: Number of questions of each stratum.
    """
    from titan_loop.analysis.step_plots import draw_intervention
    from titan_loop.evaluation.analysed_run import open_task, save_analysis
    from titan_loop.evaluation.intervention import intervention as asked
    from titan_loop.tables import columns

    loaded, task, names = open_task(run, strata, questions)
    if not strata:
        first = {name: task.held_out_questions(1, task.strata[name])[0] for name in names}
        names = [name for name, question in first.items() if len(task.waypoints(question)) > 1]
    how: Any = {"strengths": strengths, "steps": _steps(recurrent_steps, loaded)}
    how |= {"count": questions, "waypoint": waypoint, "after": after}
    found = {name: asked(loaded.model, task, name, **how) for name in names}
    rows = [["stratum", *(f"{strength:g}" for strength in strengths)]]
    rows += [[name, *(f"{share:.3f}" for share in shares)] for name, shares in found.items()]
    print("\n".join(columns(rows)))
    record = {"task": task.name, "questions": questions, "after": after}
    record |= {"strengths": strengths, "accuracy": found}
    print(save_analysis(loaded, "intervention", record))
    plot = loaded.run.directory.plots / "intervention.png"
    print(draw_intervention(found, strengths, plot))


def _steps(recurrent_steps: int | None, loaded: "Loaded") -> int:
    if recurrent_steps is not None and recurrent_steps < 1:
        raise UserError(f"recurrent_steps={recurrent_steps} must be at least 1")
    return recurrent_steps or loaded.recurrent_steps


def _open(run: Path, items: str, limit: int | None) -> tuple["Loaded", list["Item"]]:
    from titan_loop.evaluation.step_answers import read_items
    from titan_loop.inference.loading import load_checkpoint

    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} must be at least 1")
    chosen = read_items(items, limit)
    return load_checkpoint(run, use="analyse"), chosen


def _answers(run: Path, items: str, depths: tuple[int, ...], limit: int | None) -> tuple:
    from titan_loop.analysis.step_agreement import agreement as agreement_of
    from titan_loop.evaluation.step_answers import nats_of_choices
    from titan_loop.inference.loading import load_matching_tokenizer

    loaded, chosen = _open(run, items, limit)
    steps = list(depths) or list(range(1, loaded.recurrent_steps + 1))
    tokenizer = load_matching_tokenizer(loaded)
    answers, matrix = agreement_of(nats_of_choices(loaded.model, tokenizer, chosen, steps))
    return loaded, chosen, steps, answers, matrix


def _states(loaded: "Loaded", items: list["Item"], steps: int) -> Any:
    from titan_loop.evaluation.step_answers import last_token_states
    from titan_loop.inference.loading import load_matching_tokenizer

    tokenizer = load_matching_tokenizer(loaded)
    prompts = [tokenizer.encode(item.text, add_special_tokens=False).ids for item in items]
    return last_token_states(loaded.model, prompts, steps)


VERBS = {
    "agreement": agreement,
    "probes": probes,
    "pca": pca,
    "safety": safety,
    "lens": lens,
    "steps": steps,
    "patching": patching,
    "intervention": intervention,
    **analyse_latent.VERBS,
    **analyse_adaptive.VERBS,
}

run = group("analyse", VERBS)
