"""Text tables for the terminal."""

from titan_loop.evaluation.depth_report import DepthReport, SourceDepths


def depth_table(report: DepthReport) -> str:
    """Return bits per byte of every source at every depth, baselines last, lower is better.

    Intervals are half widths of the 95 % bootstrap interval over windows; `*` marks the trained R.
    """
    sources = report.sources
    depths = sorted({depth for source in sources.values() for depth in source.depths})
    baselines = list(dict.fromkeys(name for s in sources.values() for name in s.baselines))
    rows = [["bits per byte", *sources]]
    for depth in depths:
        mark = "*" if depth == report.trained_recurrent_steps else ""
        rows.append([f"R = {depth}{mark}", *(_at_depth(s, depth) for s in sources.values())])
    for name in baselines:
        rows.append([name, *(_baseline(source, name) for source in sources.values())])
    rows.append(["held-out bytes", *(f"{source.n_bytes:,}" for source in sources.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _at_depth(source: SourceDepths, depth: int) -> str:
    interval = source.depths.get(depth)
    if interval is None:
        return "-"
    return f"{interval.value:.3f} ±{(interval.high - interval.low) / 2:.3f}"


def _baseline(source: SourceDepths, name: str) -> str:
    # As wide as a depth's cell, so that the decimal points stand below each other.
    return f"{source.baselines[name]:.3f}       " if name in source.baselines else "-"
