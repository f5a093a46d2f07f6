"""The datatrove pipelines of a preparation, in the order in which they run.

    signatures ─► buckets ─► clusters        only with MinHash
    train:     reader ─► quality ─► MinHash ─► decontamination ─► held-out filter ─► tokenizer
    held_out:  documents that the filter set aside ─► tokenizer

Quality filters come before MinHash, so that a bad document never replaces its good duplicates.
"""

from typing import Any

from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)

from titan_loop.data.prepare.config import hash_config, quality_filter
from titan_loop.data.prepare.decontamination import build_ngram_index, ngram_filter
from titan_loop.data.prepare.executors import Pipeline
from titan_loop.data.prepare.preparation import Preparation
from titan_loop.data.prepare.readers import document_reader
from titan_loop.data.prepare.steps import (
    HeldOutFilter,
    HeldOutReader,
    ShortTextSignature,
    SourceTokenizer,
    TextHashes,
)
from titan_loop.text.tokenizer import TOKENIZER_NAME

READ, HASH_TEXTS, HOLD_OUT, TOKENIZE = "read", "hash_texts", "hold_out", "tokenize"
"""Names of steps. A filter's name counts its drops on the card, unless it gives reasons itself."""


def build_pipelines(preparation: Preparation) -> list[Pipeline]:
    """Return the pipelines in their order, building the n-gram index on the way."""
    config, work = preparation.config, preparation.work

    def pipeline(name: str, steps: dict[str, Any], tasks: int = preparation.tasks) -> Pipeline:
        return Pipeline(name=name, steps=steps, tasks=tasks, logs=preparation.logs(name))

    pipelines: list[Pipeline] = []
    steps = _read_and_filter(preparation)
    if config.minhash is not None:
        signatures, pairs, duplicates = (
            str(work / name) for name in ("signatures", "pairs", "duplicates")
        )
        settings = MinhashConfig(
            n_grams=config.minhash.n_grams,
            num_buckets=config.minhash.num_buckets,
            hashes_per_bucket=config.minhash.hashes_per_bucket,
            seed=config.minhash.seed,
            norm_config=config.minhash.text_norm(),
            hash_config=hash_config(),
        )
        sign = ShortTextSignature(signatures, settings, language=config.language)
        # A reader and filters of their own, for the statistics of steps are the steps'.
        own = {**_read_and_filter(preparation), "signatures": sign}
        match = {"buckets": MinhashDedupBuckets(signatures, pairs, config=settings)}
        cluster = {"clusters": MinhashDedupCluster(pairs, duplicates, config=settings)}
        pipelines.append(pipeline("signatures", own))
        pipelines.append(pipeline("buckets", match, settings.num_buckets))
        pipelines.append(pipeline("clusters", cluster, 1))
        steps["near_duplicate"] = MinhashDedupFilter(duplicates)
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
    steps[TOKENIZE] = _tokenizer(preparation, "train")
    pipelines.append(pipeline("train", steps))
    if preparation.holds_out:
        aside = HeldOutReader(str(work / "held_out"))
        pipelines.append(
            pipeline("held_out", {READ: aside, TOKENIZE: _tokenizer(preparation, "held_out")})
        )
    return pipelines


def _read_and_filter(preparation: Preparation) -> dict[str, Any]:
    config = preparation.config
    reader = document_reader(
        preparation.documents.all_files(),
        paths_file=preparation.logs("inputs.txt"),
        text_key=preparation.text_key,
        chat=preparation.chat,
    )
    filters = {
        name: quality_filter(name)(language=config.language, **options)
        for name, options in config.quality.items()
    }
    return {READ: reader, **filters}


def _tokenizer(preparation: Preparation, split: str) -> SourceTokenizer:
    return SourceTokenizer(
        str(preparation.output / split),
        tokenizer_name_or_path=str(preparation.output / TOKENIZER_NAME),
        eos_token=preparation.eos_token,
        bos_token=preparation.bos_token,
        template=None if preparation.chat is None else preparation.chat.template,
        keep_bytes=split == "held_out",
        seed=0,
    )
