"""`titan-loop retrofit MODEL --output RUN …`: a dense model that loops; `--scan`: its cost."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.families.retrofit.surgery import Surgery, retrofit_run
from titan_loop.formats.model_types import listing
from titan_loop.runs.conversion import how_to_train


def retrofit(
    model: Path | None = None,
    *,
    output: Path | None = None,
    surgery: Surgery,
    scan: bool = False,
    list: bool = False,
    lengths: Sequence[int] = (),
    sources: Sequence[str] = (),
    windows: int = 6,
    seq_len: int | None = None,
) -> None:
    """Loop layers of a dense model, in a new run directory that train and eval take like any other.

    With --scan nothing is written but a table: the cost of looping each span of layers, before any
    training. With --list the dense models are named. See titan_loop/families/retrofit/README.md.

    Args:
        model: A folder of a dense model, such as Qwen3ForCausalLM; a run of family nanbeige at
            R = 1, or a checkpoint of one.
        output: New run directory; with --scan a JSON file for the table, if wanted.
        surgery: The layers to loop, and the way to loop them.
        scan: Measure the cost of looping each span of layers, and write no run.
        list: Print the dense models that are accepted, and why others are not.
        lengths: Numbers of layers of the measured spans; 4, 8 and 12 by default, as far as the
            model has more layers.
        sources: Prepared sources whose held-out text is read; the run's by default.
        windows: Held-out windows per source.
        seq_len: Tokens of a held-out window; the run's by default.
    """
    if list:
        print(listing())
        return
    if model is None:
        raise UserError("MODEL is missing; --list names the dense models that are accepted")
    if scan:
        from titan_loop.families.retrofit.scan import scan as measured

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        table = measured(
            model,
            sources=sources,
            lengths=lengths,
            windows=windows,
            seq_len=seq_len,
            command=sys.argv,
        )
        print(table.table())
        if output is not None:
            print(table.save(output))
        return
    if output is None:
        raise UserError("--output is missing: name a new run directory")
    print(retrofit_run(model, output, surgery, sys.argv))
    print(how_to_train(output))
