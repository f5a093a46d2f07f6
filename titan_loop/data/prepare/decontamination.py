"""The n-gram index of evaluation tasks that datatrove's decontamination filter reads.

datatrove's indexer takes its tasks from lighteval; ours are lm-evaluation-harness's, so this step
keeps its hashing and file format and replaces the source of questions and answers.
"""

import logging
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.pipeline.decont.n_grams import (
    NGramsDecontConfig,
    NGramsDecontFilter,
    NGramsDecontIndexer,
)
from datatrove.utils.word_tokenizers import load_word_tokenizer

from titan_loop.data.prepare.config import Decontamination
from titan_loop.errors import UserError, first_line, require_known

logger = logging.getLogger(__name__)


def ngram_filter(settings: Decontamination, folder: Path, language: str) -> NGramsDecontFilter:
    """Return the step that drops documents which share n-grams with the index in a folder."""
    step = NGramsDecontFilter(str(folder), config=_ngram_config(settings), language=language)
    step.tokenizer = _Words(language)  # pyright: ignore[reportAttributeAccessIssue]
    return step


class _Words:
    """datatrove's words, with a ruled line or a blank to fill in as one of them.

    Otherwise every `____________` in a question would be found in every form.
    """

    def __init__(self, language: str) -> None:
        self._words = load_word_tokenizer(language)

    def word_tokenize(self, text: str) -> list[str]:
        runs = ((word, [*run]) for word, run in groupby(self._words.word_tokenize(text)))
        return [w for word, run in runs for w in (run if any(map(str.isalnum, word)) else [word])]


def _ngram_config(settings: Decontamination) -> NGramsDecontConfig:
    return NGramsDecontConfig(
        n_grams=settings.n_grams,
        find_query_ngrams=settings.query_ngrams,
        find_overlap_ngrams=True,
        **settings.for_datatrove(),
    )


def build_ngram_index(settings: Decontamination, folder: Path, language: str) -> None:
    """Write one `TASK.index.hashes` file per task.

    The folder gets its name once all tasks are in it.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    indexer = _LmEvalIndexer(str(unfinished), config=_ngram_config(settings), language=language)
    indexer.tokenizer = _Words(language)  # pyright: ignore[reportAttributeAccessIssue]
    unfinished.mkdir(parents=True, exist_ok=True)
    for name, task in _tasks(settings).items():
        hashes: set[int] = set()
        for query, answer in _questions(task):
            hashes.update(indexer.compute_hashes(answer, query))
        if not hashes:
            raise UserError(
                f"decontaminate.tasks: {name!r} has no question of {settings.n_grams} words: lower "
                "decontaminate.n_grams or drop the task"
            )
        array = np.fromiter(hashes, dtype=np.dtype(indexer.config.hash_config.np_descr))
        np.sort(array).tofile(unfinished / f"{name.replace('/', '_')}.index.hashes")
        logger.info("decontamination: %d n-grams of %s", len(array), name)
    unfinished.rename(folder)


class _LmEvalIndexer(NGramsDecontIndexer):
    """datatrove's hashing without lighteval, which only its `run` needs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_LmEvalIndexer":
        return object.__new__(cls)


def _tasks(settings: Decontamination) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    own = settings.include_path or None
    manager = TaskManager(include_path=own, include_defaults=False)
    if not set(settings.tasks) <= set(manager.all_tasks):
        # Listing the thousands of tasks it brings along takes many seconds.
        manager = TaskManager(include_path=own)
    for name in settings.tasks:
        require_known("decontaminate.tasks", name, manager.all_tasks)
    try:
        return manager.load(settings.tasks)["tasks"]
    except Exception as error:  # `datasets` and a task's own code raise many kinds
        raise UserError(
            f"decontaminate.tasks {', '.join(settings.tasks)} cannot be loaded "
            f"({first_line(error)}): check the network, or give local tasks with include_path"
        ) from error


def _questions(task: Any) -> Iterator[tuple[str, str]]:
    """Yield (question, right answer) of every document the task is scored on."""
    for document in task.eval_docs:
        query, target = task.doc_to_text(document), task.doc_to_target(document)
        if isinstance(query, int):  # several inputs, one answer: the right input's number
            yield "", task.doc_to_choice(document)[query]
            continue
        for answer in target if isinstance(target, list) else [target]:
            if isinstance(answer, int):
                answer = task.doc_to_choice(document)[answer]
            yield query, str(answer)
