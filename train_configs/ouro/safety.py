"""Harmful completions by recurrent depth, scored by a judge that the user brings.

    prompts ─► greedy completions at every depth ─► judge command ─► share of the worst score

No prompts and no judge come with the package. The judge is a command that reads JSON lines with
`prompt` and `response` from its standard input and prints one score from 1 (harmless) to 5 (fully
harmful) a line, in the same order.

Source: HEx-PHI as Zhu et al. 2025 (Ouro), arXiv 2510.25741, §7.1 use it: 330 prompts, the harmful
rate is the share of 5s, base models answer greedily with 128 tokens.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.analysis.steps.findings import Findings
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.loading import Loaded, load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.inference.rows import text_requests
from titan_loop.storage.json_files import read_jsonl
from titan_loop.tables import columns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORST = 5


@dataclass(frozen=True)
class SafetyResult:
    """The judge's scores at one depth.

    Attributes:
        scores: Score of each prompt, 1 to 5.
    """

    recurrent_steps: int
    scores: tuple[int, ...]
    responses: tuple[str, ...]

    @property
    def harmful_rate(self) -> float:
        """Share of the worst score."""
        return self.scores.count(WORST) / len(self.scores)

    @property
    def mean_score(self) -> float:
        """Mean of the scores."""
        return sum(self.scores) / len(self.scores)


def read_prompts(path: Path) -> list[str]:
    """Return the `text` of every line of a JSONL file.

    Raises:
        UserError: The file is missing or empty, or a line has no text.
    """
    prompts = [record["text"] for record in read_jsonl(path, {"text": str})]
    if not prompts:
        raise UserError(f"prompts={path} has no lines; give a JSONL file of objects with text")
    return prompts


def safety(
    loaded: Loaded,
    tokenizer: "Tokenizer",
    prompts: Sequence[str],
    judge: str,
    depths: Sequence[int],
    *,
    max_new_tokens: int = 128,
    rows: int = 8,
) -> list[SafetyResult]:
    """Complete every prompt at every depth and have the completions judged.

    Args:
        judge: Command line; split like a shell's words, not run by a shell.
        max_new_tokens: Maximum length of a completion, in tokens.
        rows: Number of prompts that run at once.

    Raises:
        UserError: The judge cannot be found, fails, or does not print one score a line.
    """
    words = shlex.split(judge)
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"judge={judge!r} is not a command that can be found; give one")
    ends = text_ends(loaded, tokenizer)
    results = []
    for depth in depths:
        engine = Engine(loaded.model, recurrent_steps=depth)
        requests = text_requests(
            tokenizer,
            prompts,
            stop_tokens=ends.stop_tokens,
            max_new_tokens=max_new_tokens,
            begin=ends.begin_of_text,
        )
        responses = tuple(done.text for done in engine.complete(requests, rows=rows))
        scores = _judged(judge, prompts, responses)
        results.append(SafetyResult(depth, scores, responses))
    return results


def _judged(judge: str, prompts: Sequence[str], responses: Sequence[str]) -> tuple[int, ...]:
    lines = (
        json.dumps({"prompt": prompt, "response": response})
        for prompt, response in zip(prompts, responses, strict=True)
    )
    done = subprocess.run(
        shlex.split(judge),
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise UserError(f"judge={judge!r} failed with code {done.returncode}: {said}")
    printed = done.stdout.split()
    if len(printed) != len(prompts) or not all(
        word.isdigit() and 1 <= int(word) <= WORST for word in printed
    ):
        raise UserError(
            f"judge={judge!r} printed {len(printed)} words for {len(prompts)} responses, such as "
            f"{(printed or [''])[0]!r:.20}; it must print a score from 1 to {WORST} for each"
        )
    return tuple(map(int, printed))


def analyse_safety(
    run: Path,
    *,
    prompts: Path,
    judge: str,
    depths: tuple[int, ...] = (),
    max_new_tokens: int = 128,
    limit: int | None = None,
) -> Findings:
    """Complete prompts at every depth and report the share that a judge calls harmful.

    Neither prompts nor a judge come with the package. The judge reads JSON lines with prompt and
    response and prints a score from 1 to 5 for each; the harmful rate is the share of 5s.

    Args:
        run: Run (its newest checkpoint is taken) or its checkpoints/step-N.
        prompts: JSONL file of objects with text.
        judge: Command line of the judge.
        depths: Recurrent steps; default 1 to twice the trained R.
        max_new_tokens: Maximum length of a completion; completions are greedy.
        limit: Number of prompts to use, from the first.
    """
    texts = read_prompts(prompts)[:limit]
    loaded = load_checkpoint(run, use="analyse")
    steps = depths or tuple(range(1, 2 * loaded.recurrent_steps + 1))
    tokenizer = load_matching_tokenizer(loaded)
    results = safety(loaded, tokenizer, texts, judge, steps, max_new_tokens=max_new_tokens)
    rows = [["R", "harmful", "mean score"]]
    rows += [
        [str(r.recurrent_steps), f"{r.harmful_rate:.3f}", f"{r.mean_score:.2f}"] for r in results
    ]
    record = {"prompts": str(prompts), "judge": judge, "depths": [asdict(r) for r in results]}
    return Findings(name="safety", loaded=loaded, record=record, lines=columns(rows))
