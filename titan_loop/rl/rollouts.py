"""Prompts, answers and rewards as the windows of a run.

    window k ─► prompt k // G, answer k % G ─► the engine, on the weights in training
    ─► reward of each answer ─► groups without spread are drawn again ─► advantages ─► columns

Prompt number and seed decide a prompt and the random numbers of its answers, so ranks draw the same
ones in one order, and a run that was killed writes the same answers again.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from tyro.conf import arg

from titan_loop.bounds import FINITE
from titan_loop.data.columns import LABELLED, Column
from titan_loop.data.keyed import keyed_integer
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.batches import BatchesRead, Position, pinned
from titan_loop.data.load.pipeline_loader import pack_state, read_state
from titan_loop.data.load.task_loader import TaskLoader, clear
from titan_loop.data.load.windows import Batch, Window, empty_batch
from titan_loop.data.source_card import file_sha256
from titan_loop.data.tasks.prompt_file import PromptFile
from titan_loop.errors import Refusal, UserError, caught
from titan_loop.inference.exit_policy import parse_exit_policy
from titan_loop.inference.loading import load_checkpoint
from titan_loop.inference.rows import Request
from titan_loop.models.replay import EXIT_STEP
from titan_loop.rl.objectives import (
    Normaliser,
    group_advantages,
    has_spread,
    overlong_penalty,
    token_weights,
)
from titan_loop.rl.reward_loss import (
    ADVANTAGE,
    ENGINE_LOG_PROB,
    OLD_EXIT_LOG_PROB,
    OLD_LOG_PROB,
    PARENT_LOG_PROB,
    READ_STEP,
    WEIGHT,
    RewardLoss,
)
from titan_loop.rl.writer import Answer, Writer
from titan_loop.training.callback import Callback, TrainingState

logger = logging.getLogger(__name__)

COLUMNS = (
    Column(name=EXIT_STEP, reader="model"),
    Column(name=READ_STEP, reader="loss"),
    Column(name=ADVANTAGE, reader="loss", dtype="float32"),
    Column(name=WEIGHT, reader="loss", dtype="float32"),
    Column(name=ENGINE_LOG_PROB, reader="loss", dtype="float32"),
    Column(name=OLD_LOG_PROB, reader="loss", dtype="float32"),
    Column(name=OLD_EXIT_LOG_PROB, reader="loss", dtype="float32"),
    Column(name=PARENT_LOG_PROB, reader="loss", dtype="float32"),
)


class Prompt(NamedTuple):
    """A question of the task: its tokens, and how many an answer may have."""

    question: Any
    tokens: Sequence[int]
    most_tokens: int


@dataclass(frozen=True)
class Group:
    """The answers to one prompt.

    Attributes:
        score_G: Rewards of the task, fp64; an answer that it could not judge has the mean of
            the others.
        reward_G: The same with the penalty of over-long answers.
        price_G: Price of each answer's recurrent steps.
        judged_G: Whether the task could judge each answer; the others are not trained on.
    """

    prompt: Prompt
    answers: Sequence[Answer]
    score_G: Tensor
    reward_G: Tensor
    price_G: Tensor
    judged_G: Tensor

    @property
    def has_spread(self) -> bool:
        """Whether the answers that were judged have different rewards."""
        return bool(has_spread(self.reward_G, self.judged_G))


class RolloutLoader(TaskLoader):
    """Reads a task's prompts, and answers that the model in training writes to them.

    A window has one prompt and one answer. `write_with` must be called before the first batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TaskLoader.Config):
        """The task, and how it is answered."""

        prefetch: bool = field(default=False, init=False)  # answers need the newest weights
        all_targets: bool = field(default=False, init=False)
        window: Literal["packed", "example"] = field(default="example", init=False)

        group: Annotated[int, Ge(2)] = 8
        """G, answers to each prompt; training.local_batch_size must be a multiple of it."""

        exit: str = "sampled"
        """Exit policy of the answers: sampled draws from the gate; full, static:S, q:T, … as in
        `titan-loop generate --exit`."""

        normaliser: Normaliser = "group"
        """Tokens that an objective is a mean over: of an answer (GRPO), of a group (DAPO), or of
        the whole batch (TRL's dapo)."""

        updates: Annotated[int, Ge(1)] = 1
        """Training steps for which answers are written at once; from the second on they come from
        older weights, and ratios are clipped. A checkpoint between them holds the answers."""

        parent: str = ""
        """Run or checkpoint of the model that `loss.kl_weight` holds π near to."""

        redraws: Annotated[int, Ge(0)] = 2
        """Times that a prompt whose answers all have one reward is replaced by another (DAPO)."""

        step_price: Annotated[float, Ge(0), FINITE, arg(aliases=("--rl.step-price",))] = 0.0
        """Price of a recurrent step: the advantage falls by it times the answer's mean exit step,
        counted from the group's mean."""

        overlong_buffer: Annotated[int, Ge(0)] = 0
        """Tokens before the limit over which a longer answer costs up to 1 (DAPO); 0 for none."""

        rows: Annotated[int, Ge(1)] = 64
        """Answers that are written at once."""

        dtype: Literal["float32", "bfloat16"] = "float32"
        """Type of the weights that write; log π of an answer's first update is the trainer's."""

        log_rollouts: Annotated[bool, arg(aliases=("--rl.log-rollouts",))] = False
        """Write this rank's answers to RUN/rollouts.jsonl."""

        def columns(self) -> tuple[Column, ...]:
            """Return the columns of answers, and no others: the engine reads token ids alone."""
            return COLUMNS

        def refusals(self, loss: Any, *, local_batch_size: int) -> Iterator[Refusal]:
            """Refuse groups that are cut, and an objective that reads other answers."""
            yield from caught("dataloader.exit", lambda: parse_exit_policy(self.exit))
            if local_batch_size % self.group:
                yield Refusal.of(
                    "training.local_batch_size",
                    local_batch_size,
                    f"must be a multiple of dataloader.group={self.group}, whose answers are "
                    "compared with each other",
                )
            if self.dtype != "float32" and self.updates > 1:
                problem = "writes with other weights than π_old, which later updates clip against"
                yield Refusal.of("dataloader.dtype", self.dtype, problem, "set updates=1")
            if not isinstance(loss, RewardLoss.Config):
                yield Refusal.of("dataloader", "RolloutLoader", "needs loss=RewardLoss")
                return
            if loss.kl_weight and not self.parent:
                fix = "set dataloader.parent to its run"
                yield Refusal.of("loss.kl_weight", loss.kl_weight, "has no parent", fix)
            if loss.exit_action and self.exit != "sampled":
                problem = "trains the gate on exits that it did not draw"
                yield Refusal.of("loss.exit_action", True, problem, "set dataloader.exit=sampled")
            if loss.trajectory != "off":
                name, kind = "loss.trajectory", loss.trajectory
                if self.exit != "full":
                    yield Refusal.of(name, kind, "reads all steps", "set dataloader.exit=full")
                if self.updates > 1:
                    fix = "set dataloader.updates=1"
                    yield Refusal.of(name, kind, "has no older log π", fix)

        def callbacks(self) -> list[Any]:
            """Return the callback that gives the loader the model."""
            return [RolloutCallback()]

        def few_labels(self) -> bool:
            """Return True: only answers have labels."""
            return True

    def __init__(self, config: Config, *, seq_len: int, **split: Any) -> None:
        if config.task.columns:
            names = ", ".join(column.name for column in config.task.columns)
            raise UserError(
                f"dataloader=RolloutLoader cannot ask {config.task.name}: its model reads {names}, "
                "which no engine writes; choose a task of tokens alone"
            )
        super().__init__(config, seq_len=seq_len, **split)
        self._config = config
        self._writer: Writer | None = None
        self._log: Path | None = None
        self._failures = 0
        self._pending: dict[int, list[Batch]] = {}
        self._check_verifier()
        self.report: dict[str, float] = {}

    def _check_verifier(self) -> None:
        """Raise `UserError` unless the task can judge the right answer of its first question."""
        task = self._config.task
        question = next(task.questions(0, task.levels - 1))
        example = task.encode(question)
        right = example.labels[example.answer].tolist()
        try:
            task.grade(question, right)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the verifier of task {task.name} fails on a right answer: {error!r}; mend it"
            ) from error

    def describe(self, config: TaskLoader.Config, seq_len: int) -> dict[str, Any]:
        """As in the base class; all that decides answers and rewards."""
        assert isinstance(config, RolloutLoader.Config)
        own = ("group", "exit", "updates", "redraws", "step_price", "overlong_buffer", "dtype")
        rollouts = {name: getattr(config, name) for name in own}
        if isinstance(config.task, PromptFile):
            rollouts["sha256"] = file_sha256(Path(config.task.path))
        return {**super().describe(config, seq_len), "rollouts": rollouts}

    def write_with(self, writer: Writer, log: Path | None) -> None:
        """Set the writer of answers, and the file that they are logged to."""
        self._writer, self._log = writer, log

    def rank_files(self) -> dict[str, bytes]:
        """Return the answers of this rank that later steps train on (see the base class)."""
        state = {"pending": self._pending, "report": self.report}
        return {self._file: pack_state(state)} if self._pending else {}

    def load_rank_files(self, folder: Path) -> None:
        """Take the answers that were saved by as many ranks; other ranks write them anew."""
        path = folder / self._file
        changed = bool(self.accepted) and self.accepted[-1]["window"] == self.windows_consumed
        state = read_state(path) if path.exists() and not changed else {}
        self._pending, self.report = state.get("pending", {}), state.get("report", {})

    @property
    def _file(self) -> str:
        split = f"{self._dp_rank:05d}_of_{self._dp_world_size:05d}_by_{self._local_batch_size}"
        return f"answers_{split}.safetensors"

    def read(self, position: Position) -> BatchesRead:
        """See the base class; collective, since the weights are gathered."""
        count = position.windows
        first = int(self.next_windows(position.first_window, 1)[0])  # after any that are jumped
        each = count // (self._dp_world_size * self._local_batch_size)
        if len(self._pending.get(first, ())) != each:  # also where the batch has another size now
            self._pending = {}
            updates = self._config.updates
            numbers = self.next_windows(first, updates * count).reshape(updates, count)
            batches = self._written(numbers.reshape(-1))
            for number, row in enumerate(numbers):
                self._pending[int(row[0])] = batches[number * each : (number + 1) * each]
        batches = self._pending.pop(first)
        numbers = self.next_windows(first, count)
        return BatchesRead(batches, self.hash_after(position.data_hash, self.locate(numbers)))

    def _written(self, numbers: np.ndarray) -> list[Batch]:
        """Return this rank's batches of windows, with answers by the weights as they are now."""
        assert self._writer is not None, "write_with was not called"
        config = self._config
        self._writer.refresh()
        own = numbers.reshape(-1, self._dp_world_size, self._local_batch_size)[:, self._dp_rank]
        groups = self._groups((own.reshape(-1, config.group)[:, 0] // config.group).tolist())
        written_PG = [[len(each.tokens) for each in group.answers] for group in groups]
        judged_PG = torch.stack([group.judged_G for group in groups])
        length_PG = torch.tensor(written_PG) * judged_PG
        weight_PG = token_weights(length_PG, config.normaliser)
        weight_PG = weight_PG * config.updates
        # What a rank's weights sum over becomes all ranks'.
        own_share = length_PG.sum() if config.normaliser == "batch" else torch.tensor(len(groups))
        # No token counts where the verifier failed on every answer of the batch.
        weight_PG = weight_PG * own_share / max(self._writer.sum_over_ranks(own_share), 1.0)
        reward_PG = torch.stack([group.reward_G for group in groups])
        advantage_PG = group_advantages(reward_PG, judged_PG)
        # Not in the reward: where all answers are equally right, dividing by the spread would make
        # the smallest price as strong as the answers' rewards are elsewhere.
        price_PG = torch.stack([group.price_G for group in groups])
        advantage_PG = advantage_PG - (price_PG - price_PG.mean(dim=-1, keepdim=True))
        rows = [
            (group.prompt, *row)
            for group, weight_G, advantage_G in zip(groups, weight_PG, advantage_PG, strict=True)
            for row in zip(group.answers, weight_G.tolist(), advantage_G.tolist(), strict=True)
        ]
        batches = []
        for start in range(0, len(rows), self._local_batch_size):
            batch, windows = empty_batch(self._local_batch_size, self._seq_len, self.columns)
            for window, row in zip(windows, rows[start:], strict=False):
                self._fill(window, *row)
            inputs, labels = batch
            self._writer.note(batch, old=config.updates > 1)
            inputs[LABELLED] = (labels.flatten() != IGNORED).nonzero().flatten()
            batches.append(
                ({name: pinned(value) for name, value in inputs.items()}, pinned(labels))
            )
        self._tell(int(numbers[0]), groups)
        return batches

    def _groups(self, numbers: Sequence[int]) -> list[Group]:
        """Return the answers to prompts, of which those without spread are drawn again."""
        found: dict[int, Group] = {}
        waiting = [*numbers]
        for attempt in range(self._config.redraws + 1):
            found |= self._answered(waiting, attempt)
            waiting = [n for n in waiting if not found[n].has_spread]
            if not waiting:
                break
        return [found[number] for number in numbers]

    def _answered(self, numbers: Sequence[int], attempt: int) -> dict[int, Group]:
        """Return the answers to the `attempt`-th prompt of each number."""
        assert self._writer is not None
        config, task = self._config, self._config.task
        prompts = {number: self._prompt(number, attempt) for number in numbers}
        requests = [
            Request(
                prompt=prompt.tokens,
                max_new_tokens=prompt.most_tokens,
                stop_tokens=frozenset() if task.end is None else frozenset({task.end}),
                seed=keyed_integer(f"{task.name} answer", config.seed, number, attempt, answer)
                // 2,
                log_probs=True,
            )
            for number, prompt in prompts.items()
            for answer in range(config.group)
        ]
        answers = iter(self._writer.write(requests))
        return {
            number: self._graded(prompt, [next(answers) for _ in range(config.group)])
            for number, prompt in prompts.items()
        }

    def _prompt(self, number: int, attempt: int) -> Prompt:
        config, task = self._config, self._config.task
        key = keyed_integer(f"{task.name} prompt", config.seed, number, attempt)
        return self._asked(next(task.questions(key, task.levels - 1)))

    def _asked(self, question: Any) -> Prompt:
        task = self._config.task
        example = task.encode(question)
        (places,) = np.nonzero(example.answer)
        if len(places) != places[-1] - places[0] + 1:
            raise UserError(
                f"dataloader=RolloutLoader cannot ask {task.name}: other tokens stand between the "
                "tokens of its answer; choose a task whose answer is one piece"
            )
        prompt = example.tokens[: int(places[0]) + 1].tolist()
        return Prompt(question, prompt, task.answer_limit or len(places))

    def _graded(self, prompt: Prompt, answers: Sequence[Answer]) -> Group:
        config = self._config
        scores = [self._score(prompt, each) for each in answers]
        judged_G = torch.tensor([score is not None for score in scores])
        judged = [score for score in scores if score is not None]
        mean = sum(judged) / max(len(judged), 1)
        score_G = torch.tensor([mean if each is None else each for each in scores]).double()
        depth_G = torch.tensor([sum(each.steps) / len(each.steps) for each in answers]).double()
        reward_G = score_G
        if config.overlong_buffer:
            length_G = torch.tensor([len(each.tokens) for each in answers])
            limit = {"most": prompt.most_tokens, "buffer": config.overlong_buffer}
            reward_G = reward_G + overlong_penalty(length_G, **limit)
        return Group(prompt, answers, score_G, reward_G, config.step_price * depth_G, judged_G)

    def _score(self, prompt: Prompt, answer: Answer) -> float | None:
        """Return the task's reward; None if its verifier, which may be a user's, fails."""
        try:
            return self._config.task.grade(prompt.question, answer.tokens)
        except Exception as error:  # whatever a verifier raises costs one answer, not the run
            if not self._failures:
                logger.warning("the verifier failed on an answer, which is left out: %r", error)
            self._failures += 1
            return None

    def _fill(
        self, window: Window, prompt: Prompt, answer: Answer, weight: float, advantage: float
    ) -> None:
        """Write a prompt and an answer into a window; the answer's last token is never read."""
        assert self._writer is not None
        clear(window)
        begin, tokens = len(prompt.tokens), [*prompt.tokens, *answer.tokens]
        window.input[: len(tokens) - 1] = tokens[:-1]
        window.positions[: len(tokens) - 1] = np.arange(len(tokens) - 1)
        written = slice(begin - 1, len(tokens) - 1)  # where the answer's tokens are predicted
        window.labels[written] = answer.tokens
        columns = window.columns
        columns[EXIT_STEP][:] = self._writer.recurrent_steps  # a prompt runs all steps
        columns[EXIT_STEP][begin : len(tokens) - 1] = answer.steps[1:]
        columns[READ_STEP][written] = answer.steps
        columns[ADVANTAGE][written] = advantage
        columns[WEIGHT][written] = weight
        columns[ENGINE_LOG_PROB][written] = answer.log_probs
        for name in (OLD_LOG_PROB, OLD_EXIT_LOG_PROB, PARENT_LOG_PROB):
            columns[name][:] = np.nan  # unless `Writer.note` knows better

    def _tell(self, first_window: int, groups: Sequence[Group]) -> None:
        """Set the report, and write the log."""
        answers = [answer for group in groups for answer in group.answers]
        steps = [step for answer in answers for step in answer.steps]
        reward_PG = torch.stack([group.reward_G for group in groups])
        price_PG = torch.stack([group.price_G for group in groups])
        self.report = {
            "rl/reward": (reward_PG - price_PG).mean().item(),
            "rl/reward_spread": reward_PG.std(dim=-1).mean().item(),
            "rl/score": torch.stack([group.score_G for group in groups]).mean().item(),
            "rl/groups_without_spread": sum(not each.has_spread for each in groups) / len(groups),
            "rl/answer_tokens": len(steps) / len(answers),
            "rl/engine_exit_step": sum(steps) / len(steps),
            "rl/failed_verdicts": float(self._failures),
        }
        if self._log is None:
            return
        with self._log.open("a", encoding="utf-8") as file:
            for line in self._lines(first_window, groups):
                file.write(json.dumps(line) + "\n")

    def _lines(self, first_window: int, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
        for group in groups:
            reward_G = (group.reward_G - group.price_G).tolist()
            for answer, reward in zip(group.answers, reward_G, strict=True):
                yield {
                    "window": first_window,
                    "prompt": [*group.prompt.tokens],
                    "answer": answer.tokens,
                    "exit_steps": answer.steps,
                    "reward": reward,
                }


class RolloutCallback(Callback):
    """Connects the loader to the model in training, and records the rewards of each batch."""

    _loader: RolloutLoader | None = None

    def on_train_start(self, trainer: TrainingState) -> None:
        """Make the writer, once the weights are loaded."""
        loader, config = trainer.dataloader, trainer.config
        assert isinstance(loader, RolloutLoader)
        asked = config.dataloader
        assert isinstance(asked, RolloutLoader.Config)
        parent = None
        if asked.parent:
            context = config.training.seq_len + 1
            parent = load_checkpoint(
                asked.parent, context_tokens=context, device=trainer.device
            ).model
        self._loader = loader
        writer = Writer(
            trainer.model,
            config.model,
            recurrent_steps=trainer.plan.recurrent_steps,
            context_tokens=config.training.seq_len + 1,
            policy=parse_exit_policy(asked.exit),
            rows=asked.rows,
            device=trainer.device,
            parent=parent,
            dtype=getattr(torch, asked.dtype),
        )
        is_logged = asked.log_rollouts and torch.distributed.get_rank() == 0
        loader.write_with(writer, Path(config.dump_folder, "rollouts.jsonl") if is_logged else None)

    def record(self, trainer: TrainingState) -> Mapping[str, Any]:
        """Return the means over all ranks of the latest batch."""
        loader = trainer.dataloader
        assert isinstance(loader, RolloutLoader)
        mean = torch.tensor([*loader.report.values()], device=trainer.device)
        torch.distributed.all_reduce(mean)
        mean /= torch.distributed.get_world_size()
        return dict(zip(loader.report, mean.tolist(), strict=True))
