"""`titan-loop scaling RUNS…`: scaling laws in parameters, tokens and recurrent steps."""

from pathlib import Path

from titan_loop.cli.arguments import command
from titan_loop.errors import UserError, require_at_least


@command("scaling")
def run(
    runs: tuple[Path, ...] = (),
    *,
    csv: Path | None = None,
    output: Path = Path("scaling"),
    skip: float = 0.0,
    bootstrap: int = 200,
    seed: int = 0,
) -> None:
    """Fit scaling laws to runs or to a table of losses, with confidence intervals.

    Fits three laws in which a recurrent step is worth some parameters: linear, power and bounded.
    The error on the largest sizes, token counts and R, each held out by itself, chooses one of the
    three. Prints the coefficients and writes scaling.json, which `titan-loop plan --law` reads, two
    plots of the chosen law, and losses.csv, the points of the runs as --csv reads them.

    Args:
        runs: Run directories and recipe folders, all trained on the same data.
        csv: Instead of runs, a file with the columns parameters and tokens (counts),
            recurrent_steps and loss (nats per token), or N, D, R, loss. Optional columns:
            looped_parameters, experts with total_parameters, unique_tokens, width, run, seed.
        output: Folder for the results.
        skip: Share of every run's tokens, from its start, whose points are not fitted. Early in
            training the loss falls later the larger R is, which no law describes.
        bootstrap: Number of resamplings for each 95 % interval; 0 for no intervals.
        seed: Seed of random starts and resamplings.
    """
    from titan_loop.analysis.scaling.data import read_csv, read_runs, write_csv
    from titan_loop.analysis.scaling.study import study, write_study

    if (csv is None) == (not runs):
        raise UserError("scaling: give either RUNS or --csv FILE")
    require_at_least(0, bootstrap=bootstrap)
    if not 0 <= skip < 1:
        raise UserError(f"skip={skip} must be at least 0 and below 1")
    points = read_runs(runs) if csv is None else read_csv(csv)
    laws = study(points.late(skip), samples=bootstrap, seed=seed)
    for law in laws:
        print("\n".join(law.lines()))
    source = f"titan-loop scaling {' '.join(map(str, runs or ('--csv', csv)))}"
    source += f" --skip {skip:g}" * bool(skip)
    for path in write_study(laws, output, source=source):
        print(path)
    if csv is None:
        write_csv(points, output / "losses.csv")
