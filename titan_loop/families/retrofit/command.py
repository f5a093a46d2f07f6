"""`titan-loop retrofit MODEL --output RUN …`: a dense model that loops; `--scan`: its cost."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.families.retrofit.surgery import Mode, Surgery, retrofit_run
from titan_loop.formats.model_types import listing
from titan_loop.runs.conversion import how_to_train


def retrofit(
    model: Path | None = None,
    *,
    output: Path | None = None,
    mode: Mode = "identity",
    prelude: int | None = None,
    core: int | None = None,
    coda: int | None = None,
    recurrent_steps: int = 2,
    rank: int = 0,
    noise: float = 0.0,
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
        mode: identity adds a bridge that starts at zero; plain adds nothing; damped makes each
            step 1/R of a pass; dropped leaves out layers before the looped ones and mixes state and
            prelude; tied makes one looped layer of several.
        prelude: Number of layers before the loop.
        core: Number of looped layers.
        coda: Number of layers after the loop.
        recurrent_steps: R that the model is used at; with damped also the steps of one pass, with
            tied the number of layers that one looped layer stands for.
        rank: Rank of adapters; 0 for none. With tied each step has a set, which approximates the
            differences from the dense layers.
        noise: With dropped, σ of the state's initial noise in training; 0 starts at the prelude's
            output.
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
        sample = {"sources": sources, "windows": windows, "seq_len": seq_len}
        table = measured(model, lengths=lengths, command=sys.argv, **sample)
        print(table.table())
        if output is not None:
            print(table.save(output))
        return
    if output is None or prelude is None or core is None or coda is None:
        given = {"output": output, "prelude": prelude, "core": core, "coda": coda}
        missing = next(name for name, value in given.items() if value is None)
        raise UserError(f"--{missing} is missing; --scan recommends layers")
    how = {"mode": mode, "recurrent_steps": recurrent_steps, "rank": rank, "noise": noise}
    surgery = Surgery(prelude=prelude, core=core, coda=coda, **how)
    print(retrofit_run(model, output, surgery, sys.argv))
    print(how_to_train(output))
