"""Speed of rollouts: answers sampled for rewards, with exits at R/2 and at full depth.

    .venv/hf5/bin/python tools/bench/rollouts.py   # with transformers beside it
    python tools/bench/rollouts.py

Model, prompts, exits and aims are those of `serving.py --parts exits`, but answers come from the
writer of the stage `reward`: drawn at temperature 1, each token with its log-probability.
In transformers, `generate` draws without log-probabilities. Ends with code 1 if an aim is missed.
"""

import statistics
from collections.abc import Callable
from functools import partial

import titan_loop.compat  # noqa: F401  isort: skip  (before any torchtitan module)
from conditions import begin
from serving import UniformExit, Written, built, compare_exits, prompts_of, shape_parser
from timing import now

from titan_loop.evaluation.share_work import rank_device
from titan_loop.inference.exit_policy import ExitPolicy, StaticStep
from titan_loop.inference.rows import Request
from titan_loop.rl.writer import Writer


def main() -> int:
    """Print tokens a second of both depths and of transformers; return 1 if an aim is missed."""
    options = begin(shape_parser(__doc__))
    shape, model = built(options)
    steps, count = options.recurrent_steps, options.new_tokens
    requests = [
        Request(prompt=prompt, max_new_tokens=count, seed=seed, log_probs=True)
        for seed, prompt in enumerate(prompts_of(options))
    ]

    def written(writer: Writer) -> Written:
        began = now()
        answers = writer.write(requests)
        seconds = now() - began
        assert all(len(answer.log_probs) == count for answer in answers)
        return seconds, statistics.mean(step for answer in answers for step in answer.steps)

    def rollouts(policy: ExitPolicy) -> Callable[[], Written]:
        writer = Writer(
            model,
            shape,
            recurrent_steps=steps,
            context_tokens=options.prompt_tokens + count,
            policy=policy,
            rows=options.rows,
            device=rank_device(),
        )
        writer.refresh()
        return partial(written, writer)

    full, exits = rollouts(StaticStep()), rollouts(UniformExit(steps))
    return 0 if compare_exits(full, exits, model, options, samples=True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
