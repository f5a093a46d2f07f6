"""The model `titan_loop` of lm-evaluation-harness.

    lm_eval's requests ─ tokenise ─► TokenScorer (log-likelihoods, rolling windows) ─┐
                                 └─► Engine (generate_until) ────────────────────────┴─► lm_eval

A log-likelihood takes one pass over the prompt, in which each step sees its own step's keys, as in
the engine's prefill; `kv_cache` matters for generated tokens only. That pass scores all readings:
`reading` chooses the one that answers, and changing it costs no further pass.

Every rank builds all requests, computes its share of them and gets the other ranks' results, so the
harness need not know about ranks.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titan_loop.errors import UserError, nearest, require_known
from titan_loop.evaluation.harness_generation import Generation, row_seed
from titan_loop.evaluation.readings import Reading, policy_reading
from titan_loop.evaluation.share_work import rank_device, share_work
from titan_loop.evaluation.token_scorer import ContinuationScores, TokenRequest, TokenScorer
from titan_loop.inference.cache import cache_strategy
from titan_loop.inference.engine import Engine, require_prefill_steps
from titan_loop.inference.exit_policy import parse_exit_policy
from titan_loop.inference.loading import Loaded, load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.inference.rows import text_requests
from titan_loop.storage.json_files import json_sha256
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.conversation import SYSTEM, Conversation, Turn, parse_messages
from titan_loop.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)

MODEL_NAME = "titan_loop"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_HARNESS_DEVICE = "cuda:0"  # default of its command line
_INSTEAD = {
    "pretrained": "give checkpoint=RUN",
    "trust_remote_code": "leave it out: a checkpoint has no code",
    "add_bos_token": "leave it out: the run records it",
    "parallelize": "leave it out, and start one process per device with torchrun",
}
"""Arguments of the harness' model `hf` → what to do here."""


@dataclass
class StepCount:
    """Number of recurrent steps and tokens behind the answers so far."""

    steps: int = 0
    tokens: int = 0

    @property
    def mean(self) -> float | None:
        """Steps per token; None before the first."""
        return self.steps / self.tokens if self.tokens else None


class LoopLM(TemplateLM):
    """A checkpoint behind the model interface of lm-evaluation-harness.

    Args:
        checkpoint: A checkpoint, or a run (its newest whole checkpoint is taken).
        recurrent_steps: R; None takes the trained R.
        exit: An exit policy as in `titan-loop generate`, with "/" for its commas.
        prefill_steps: Recurrent steps of prompts, at most the reading's own; None for as many.
        device: Name of the device; None or "cuda:0" takes this rank's.
        max_length: Context in tokens; None takes the trained window.
        readings: Several readings at once, instead of `exit`.

    Attributes:
        reading: Index of the reading that answers.
        counts: Steps and tokens behind the answers by task; the caller clears it to start over.
    """

    def __init__(
        self,
        checkpoint: str | Path | None = None,
        *,
        recurrent_steps: int | None = None,
        exit: str = "full",
        kv_cache: str = "full",
        prefill_steps: int | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        tokenizer: str | None = None,
        readings: Sequence[Reading] | None = None,
        loaded: Loaded | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        for name, value in unknown.items():
            known = [*signature(LoopLM).parameters][:-1]
            fix = f"; {_INSTEAD[name]}" if name in _INSTEAD else nearest(name, known)
            raise UserError(f"{name}={value} is unknown{fix}")
        rows = _whole("batch_size", batch_size, least=1) or 1
        if max_batch_size not in (None, rows):
            raise UserError(f"max_batch_size={max_batch_size} has no effect; give batch_size alone")
        recurrent_steps = _whole("recurrent_steps", recurrent_steps, least=1)
        max_length = _whole("max_length", max_length, least=2)
        cache_strategy(kv_cache)
        require_known("dtype", dtype, DTYPES)
        parse_exit_policy(exit)  # refuses a wrong one before a checkpoint is read
        if loaded is None:
            if checkpoint is None:
                raise UserError("checkpoint is missing; give --model_args checkpoint=RUN")
            loaded = load_checkpoint(
                checkpoint, context_tokens=max_length, device=_device(device), dtype=DTYPES[dtype]
            )
        self.loaded = loaded
        if readings is None:
            steps = loaded.recurrent_steps if recurrent_steps is None else recurrent_steps
            readings = [policy_reading(exit, steps)]
        self.readings = list(readings)
        self.prefill_steps = _whole("prefill_steps", prefill_steps, least=1)
        for one in self.readings:
            require_prefill_steps(self.prefill_steps, one.deepest_step)
        self.reading = 0
        self.counts: dict[str | None, StepCount] = defaultdict(StepCount)
        self._tasks: list[str | None] = []  # whose requests `_scores` is asked
        self.kv_cache = kv_cache
        self._text_tokenizer = load_matching_tokenizer(loaded, tokenizer)
        self._ends = text_ends(loaded, self._text_tokenizer)
        self._scorer = TokenScorer(loaded.model, self.readings, batch_rows=rows)
        self._rows = rows
        self._chats: dict[str, tuple[list[int], str]] = {}
        # Every reading asks the same requests again.
        self._known: dict[TokenRequest, ContinuationScores] = {}
        self._truncated = 0
        self._warnings: set[str] = set()

    @property
    def max_length(self) -> int:
        """Context in tokens."""
        return self.loaded.model.config.max_seq_len

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        if self._ends.end_of_text is None:
            raise UserError(
                f"the tokenizer of {self.loaded.checkpoint} has no token that ends a text"
            )
        return self._ends.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """Token in front of a text without context: BOS, or else the end of the text before."""
        begin = self._ends.begin_of_text
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Name of tokenizer and chat template in the harness' cache of request texts."""
        return json_sha256([self._text_tokenizer.to_str(), self.chat_template()])

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        text = self.loaded.run.text_format(self._text_tokenizer)
        if not text.knows_chats:
            self._warn("this model was not trained on conversations; ChatML is used")
        return ChatEncoder(self._text_tokenizer, text.template)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template of the model's conversations, Jinja text; it has but one."""
        return self._chat_encoder.template.text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text up to the next answer, or to the end of a begun one.

        A template that refuses a system turn gets none, as in the harness' own models.
        """
        turns = parse_messages(chat_history)
        try:
            return self._chat(turns, add_generation_prompt)
        except (TypeError, UserError):
            if turns[0].role != SYSTEM:
                raise
            self._warn("the chat template refuses system turns: they were left out")
            return self._chat(turns[1:], add_generation_prompt)

    def _chat(self, turns: list[Turn], answer_next: bool) -> str:
        template, before = self._chat_encoder.template, turns if answer_next else turns[:-1]
        conversation = Conversation(tuple(turns))
        text = template.prompt(conversation) if answer_next else template.continued(conversation)
        ids = self._chat_encoder.prompt(Conversation(tuple(before))).ids  # with the template's BOS
        self._chats[text] = ids, "" if answer_next else turns[-1].content.rstrip()
        return text

    def get_model_info(self) -> dict[str, Any]:
        """Return a description that the harness writes beside its results."""
        return {
            "checkpoint": str(self.loaded.checkpoint),
            "reading": self.readings[self.reading].name,
            "kv_cache": self.kv_cache,
            "mean_steps": self.count.mean,
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return token ids, with BOS in front if the model's documents begin with it."""
        if string in self._chats:
            ids, begun = self._chats[string]
            return [*ids, *encode_prompt(self._text_tokenizer, begun, None)]
        begin = None if add_special_tokens is False else self._ends.begin_of_text
        return encode_prompt(self._text_tokenizer, string, begin)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context not in self._chats:
            return super()._encode_pair(context, continuation)
        # As in training, an answer is encoded apart from the header before it.
        ids, begun = self._chats[context]
        said = len(encode_prompt(self._text_tokenizer, begun, None))
        answer = encode_prompt(self._text_tokenizer, begun + continuation, None)
        return [*ids, *answer[:said]], answer[said:]

    @property
    def count(self) -> StepCount:
        """Steps and tokens behind all answers."""
        counts = self.counts.values()
        return StepCount(sum(each.steps for each in counts), sum(each.tokens for each in counts))

    def loglikelihood(
        self, requests: list["Instance"], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of continuations, and whether greedy decoding gives them."""
        self._tasks = [each.task_name for each in requests]
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list["Instance"], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, each token predicted once."""
        windows: list[list[TokenRequest]] = []
        for instance in requests:
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(instance.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = map(make_disjoint_window, rolling)
            windows.append([TokenRequest(tuple(c), tuple(t)) for c, t in pairs])
        asked = zip(requests, windows, strict=True)
        self._tasks = [request.task_name for request, parts in asked for _ in parts]
        scores = iter(self._scores([request for parts in windows for request in parts]))
        return [sum(next(scores)[0] for _ in parts) for parts in windows]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([self._fitting(*request) for request in requests])

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
        """Return completions of at most `max_gen_toks` tokens, up to the first stop string."""
        reading = self.readings[self.reading]
        # The harness' --seed sets torch's, and a sample may depend on nothing but that and its row.
        seed = torch.initial_seed()
        asked = [
            Generation.of(*instance.args, seed=row_seed(seed, row))
            for row, instance in enumerate(requests)
        ]
        answers = self._generate(asked, reading)
        for instance, answer in zip(requests, answers, strict=True):
            self.counts[instance.task_name].steps += answer["steps"]
            self.counts[instance.task_name].tokens += answer["tokens"]
            self._truncated += answer["cut"]
        self._warn_of_truncation()
        if ended := sum(answer["finish"] == "context" for answer in answers):
            self._warn(
                f"{ended} of {len(answers)} answers ended at the context of {self.max_length} "
                "tokens, before their own limit; raise max_length or lower max_gen_toks"
            )
        return [answer["text"] for answer in answers]

    def _generate(self, asked: Sequence["Generation"], reading: Reading) -> list[dict[str, Any]]:
        engine = Engine(
            self.loaded.model,
            recurrent_steps=reading.recurrent_steps,
            kv_cache=self.kv_cache,
            exit_policy=reading.policy,
            prefill_steps=self.prefill_steps,
        )
        prompts = [self._prompt(one) for one in asked]
        # Rows with one set of options run together, and neighbours are equally long.
        order = sorted(
            range(len(asked)), key=lambda i: (repr(asked[i].key()[1:]), -len(prompts[i]))
        )

        def work(share: Sequence[int]) -> list[dict[str, Any]]:
            return [
                answer
                for _, rows in groupby(share, key=lambda i: asked[i].key()[1:])
                for answer in self._complete(engine, [(asked[i], prompts[i]) for i in rows])
            ]

        answers = dict(zip(order, share_work(order, work), strict=True))
        return [answers[index] for index in range(len(asked))]

    def _complete(
        self, engine: Engine, asked: Sequence[tuple["Generation", list[int]]]
    ) -> list[dict[str, Any]]:
        first, _ = asked[0]
        # As the harness' own models do, unless the answer alone would fill the context.
        room = self.max_length - first.max_new_tokens
        room = room if room > 0 else self.max_length // 2
        requests = text_requests(
            self._text_tokenizer,
            [prompt[-room:] for _, prompt in asked],
            stop_tokens=self._ends.stop_tokens,
            max_new_tokens=first.max_new_tokens,
            stop=first.until,
            seeds=[one.seed for one, _ in asked],
        )
        completed = engine.complete(requests, rows=self._rows, sampling=first.sampling)
        return [
            {
                "text": done.text,
                "steps": sum(done.steps),
                "tokens": len(done.tokens),
                "finish": done.finish,
                "cut": len(prompt) > room,
            }
            for done, (_, prompt) in zip(completed, asked, strict=True)
        ]

    def _prompt(self, asked: "Generation") -> list[int]:
        return self.tok_encode(asked.prompt) or [self.prefix_token_id]

    def _fitting(
        self, text: tuple[str, str], context: list[int], continuation: list[int]
    ) -> TokenRequest:
        if not continuation:  # its text merged into the last token of the context
            continuation = self.tok_encode(text[1], add_special_tokens=False)
        if not continuation:
            raise UserError(f"a request scores an empty continuation, after {text[0][-40:]!r}")
        if len(continuation) > self.max_length:
            problem = f"an answer has {len(continuation)} tokens, the context {self.max_length}"
            raise UserError(f"{problem}; raise max_length")
        if not context:  # of white space alone, which the harness moves to the continuation
            context = [self.prefix_token_id]
            if continuation[0] == self.prefix_token_id and len(continuation) > 1:
                continuation = continuation[1:]  # the harness' rule for a context of ""
        room = self.max_length + 1 - len(continuation)
        return TokenRequest(tuple(self._cut(context, room)), tuple(continuation))

    def _cut(self, tokens: list[int], room: int) -> list[int]:
        self._truncated += len(tokens) > room
        return tokens[-room:]

    def _scores(self, requests: Sequence[TokenRequest]) -> list[tuple[float, bool]]:
        """Return each log-likelihood, and whether greedy decoding would have given the tokens."""
        self._warn_of_truncation()
        new = [request for request in dict.fromkeys(requests) if request not in self._known]
        self._known.update(zip(new, self._scorer.score(new), strict=True))
        answers = []
        for task, score in zip(self._tasks, map(self._known.__getitem__, requests), strict=True):
            self.counts[task].steps += score.steps[self.reading]
            self.counts[task].tokens += score.tokens
            answers.append((-score.nats[self.reading], score.greedy[self.reading]))
        return answers

    def _warn_of_truncation(self) -> None:
        warning = (
            f"{self._truncated} prompts are longer than the context of {self.max_length} tokens "
            "and lost their beginning; raise max_length or use fewer shots"
        )
        if self._truncated:
            self._warn(warning)
        self._truncated = 0

    def _warn(self, warning: str) -> None:
        if warning not in self._warnings:  # every reading asks the same requests again
            logger.warning("%s", warning)
            self._warnings.add(warning)


register_model(MODEL_NAME)(LoopLM)  # as a decorator it would hide the class' own attributes


def _whole(name: str, value: int | str | None, *, least: int) -> int | None:
    """Return a number that may come as text, as everything in `--model_args` may."""
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if number < least:
        raise UserError(f"{name}={value} must be a whole number of at least {least}")
    return number


def _device(name: str | None) -> torch.device:
    try:
        return rank_device() if name in (None, _HARNESS_DEVICE) else torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name} is unknown; leave it out for this rank's own") from error
