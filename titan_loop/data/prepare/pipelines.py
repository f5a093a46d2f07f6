"""The datatrove pipelines of a preparation, in the order in which they run.

    signatures ─► buckets ─► clusters        only with MinHash
    train:     reader ─► quality ─► MinHash ─► decontamination ─► held-out filter ─► tokenizer
    held_out:  documents that the filter set aside ─► tokenizer

Quality filters come before MinHash, so that a bad document never replaces its good duplicates.
"""

from pathlib import Path
from typing import Any

from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)

from titan_loop.data.prepare.config import PrepareConfig, hash_config, quality_filter
from titan_loop.data.prepare.decontamination import build_ngram_index, ngram_filter
from titan_loop.data.prepare.document_tokenizer import PlainTextTokenizer
from titan_loop.data.prepare.executors import Pipeline
from titan_loop.data.prepare.pipeline_documents import PipelineReader, PipelineTokenizer
from titan_loop.data.prepare.pipeline_steps import (
    ChatTokenizer,
    HeldOutFilter,
    HeldOutReader,
    ShortTextSignature,
    TextHashes,
)
from titan_loop.data.prepare.preparation import Preparation
from titan_loop.data.prepare.readers import document_reader
from titan_loop.text.tokenizer import TOKENIZER_NAME

CHANGES = "changed"
"""Folder of the logs with documents that their tokens do not give back."""

READ, HASH_TEXTS, HOLD_OUT, TOKENIZE = "read", "hash_texts", "hold_out", "tokenize"
"""Names of steps. A filter's name counts its drops on the card, unless it gives reasons itself."""


def build_pipelines(preparation: Preparation) -> list[Pipeline]:
    """Return the pipelines in their order, building the n-gram index on the way."""
    output, config, work = preparation.output, preparation.config, preparation.work
    chat = preparation.chat

    def tokenize(split: str) -> Any:
        options: dict[str, Any] = {
            "tokenizer_name_or_path": str(output / TOKENIZER_NAME),
            "eos_token": preparation.eos_token,
            "bos_token": preparation.bos_token,
            "changes": preparation.logs(CHANGES),
            "keep_bytes": split == "held_out",
            "seed": 0,
        }
        if chat is None:
            own = PipelineTokenizer if preparation.documents.pipeline else PlainTextTokenizer
            return own(str(output / split), **options)
        return ChatTokenizer(
            str(output / split), template=chat.template, save_loss_metadata=True, **options
        )

    pipelines: list[Pipeline] = []
    steps = {READ: _reader(preparation, preparation.logs("dropped")), **_quality(config)}
    if config.minhash is not None:
        pipelines += _minhash_pipelines(preparation)
        steps["near_duplicate"] = MinhashDedupFilter(str(work / "duplicates"))
    if config.decontaminate is not None:
        index = work / "ngrams"
        if not index.exists():
            build_ngram_index(config.decontaminate, index, config.language)
        steps["contaminated"] = ngram_filter(config.decontaminate, index, config.language)
    if preparation.holds_out:
        files = [file.path for file in preparation.documents.held_out_files]
        if files:  # otherwise equal texts are on the same side
            steps[HASH_TEXTS] = TextHashes(files, work / HASH_TEXTS)
        steps[HOLD_OUT] = HeldOutFilter(files, preparation.held_out_fraction, work / "held_out")
    steps[TOKENIZE] = tokenize("train")
    pipelines.append(_pipeline(preparation, "train", steps, preparation.tasks))
    if preparation.holds_out:
        held_out = {READ: HeldOutReader(str(work / "held_out")), TOKENIZE: tokenize("held_out")}
        pipelines.append(_pipeline(preparation, "held_out", held_out, preparation.tasks))
    return pipelines


def _pipeline(preparation: Preparation, name: str, steps: dict[str, Any], tasks: int) -> Pipeline:
    return Pipeline(name=name, steps=steps, tasks=tasks, logs=preparation.logs(name))


def _reader(preparation: Preparation, examples: Path | None) -> Any:
    if pipeline := preparation.documents.pipeline:
        return PipelineReader(
            pipeline,
            tokenizer=preparation.output / TOKENIZER_NAME,
            eos_token=preparation.eos_token,
            rewrites="c4_quality" in preparation.config.quality,
            text_key=preparation.text_key,
            chat=None,
            examples=None if examples is None else str(examples),
        )
    return document_reader(
        preparation.documents,
        paths_file=preparation.logs("inputs.txt"),
        text_key=preparation.text_key,
        chat=preparation.chat,
        examples=examples,
    )


def _quality(config: PrepareConfig) -> dict[str, Any]:
    return {
        name: quality_filter(name)(language=config.language, **options)
        for name, options in config.quality.items()
    }


def _minhash_pipelines(preparation: Preparation) -> list[Pipeline]:
    """Return the pipelines that find near-duplicates; all but a cluster's root are removed."""
    work = preparation.work
    names = ("signatures", "pairs", "duplicates")
    signatures, pairs, duplicates = (str(work / name) for name in names)
    minhash = preparation.config.minhash
    assert minhash is not None
    config = MinhashConfig(
        n_grams=minhash.n_grams,
        num_buckets=minhash.num_buckets,
        hashes_per_bucket=minhash.hashes_per_bucket,
        seed=minhash.seed,
        norm_config=minhash.text_norm(),
        hash_config=hash_config(),
    )
    sign = ShortTextSignature(signatures, config, language=preparation.config.language)
    read = {READ: _reader(preparation, None), **_quality(preparation.config), "signatures": sign}
    match = {"buckets": MinhashDedupBuckets(signatures, pairs, config=config)}
    cluster = {"clusters": MinhashDedupCluster(pairs, duplicates, config=config)}
    return [
        _pipeline(preparation, "signatures", read, preparation.tasks),
        _pipeline(preparation, "buckets", match, config.num_buckets),
        _pipeline(preparation, "clusters", cluster, 1),
    ]
