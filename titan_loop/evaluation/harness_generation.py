"""Requests of lm-evaluation-harness for generated text: its options in the engine's terms."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.models.utils import normalize_gen_kwargs

from titan_loop.errors import UserError, require_at_least
from titan_loop.inference.sampling import Sampling

_NO_EFFECT = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "use_cache": True,
}
"""Options of generation in transformers → the one value that the engine can follow."""


@dataclass(frozen=True)
class Generation:
    """One answer to generate; raises `UserError` for an option that the engine lacks."""

    prompt: str
    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int

    @classmethod
    def of(cls, prompt: str, given: dict[str, Any], *, seed: int) -> "Generation":
        """Read the `generation_kwargs` of a request as the harness' own models do."""
        options: dict[str, Any] = {**normalize_gen_kwargs(given)}
        until = tuple(stop for stop in options.pop("until") if stop)
        length = options.pop("max_gen_toks")
        require_at_least(1, max_gen_toks=length)
        # Normalised, a temperature that is absent differs from one of 0.
        temperature = options.pop("temperature", None)
        if not options.pop("do_sample"):
            temperature = 0.0
        elif temperature == 0.0:
            raise UserError("temperature=0 with do_sample=true: leave one of them out")
        sampling = Sampling(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=float(options.pop("top_p", 1.0)),
            top_k=options.pop("top_k", None) or None,
        )
        for name, value in options.items():
            if name not in _NO_EFFECT or value not in (None, _NO_EFFECT[name]):
                raise UserError(
                    f"generation_kwargs: {name}={value} is not an option of this engine; leave it "
                    "out"
                )
        return cls(prompt, until, length, sampling, seed)

    def key(self) -> tuple[Any, ...]:
        """Return the parts that the answer depends on besides the seed, the prompt first."""
        how = (self.sampling.temperature, self.sampling.top_p, self.sampling.top_k)
        return (self.prompt, self.until, self.max_new_tokens, how)


def row_seed(seed: int, row: int) -> int:
    """Return the seed of a row's sample, given the harness' own."""
    return int(np.random.SeedSequence((seed, row)).generate_state(1, np.uint64)[0] >> 1)
