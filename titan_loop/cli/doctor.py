"""`titan-loop doctor`: report how fit this machine is for a run, with a fix for every problem."""

import os
from pathlib import Path

from titan_loop.cli.arguments import command
from titan_loop.errors import EXIT_CRASH, EXIT_OK
from titan_loop.tables import columns


def doctor(*, run_directory: Path = Path("runs")) -> int:
    """Check this machine, and suggest a fix for every problem.

    The exit code is 1 if a problem would keep a run from training.

    Args:
        run_directory: Folder that runs will be written to.
    """
    from titan_loop.cli.machine import check_machine

    findings = list(check_machine(run_directory, os.environ))
    for line in columns([(finding.section, finding.text) for finding in findings], left=(0, 1)):
        print(line)
    wrong = [finding for finding in findings if finding.fix is not None]
    print(f"\n{len(wrong)} problem{'' if len(wrong) == 1 else 's'} found")
    for finding in wrong:
        weight = "blocks training" if finding.blocks_training else "warning"
        print(f"- {finding.section} ({weight}): {finding.text}\n  fix: {finding.fix}")
    return EXIT_CRASH if any(finding.blocks_training for finding in wrong) else EXIT_OK


run = command("doctor", doctor)
