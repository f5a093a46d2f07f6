"""Deduplication, quality filters and decontamination, on documents that must and must not go."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.shapes.shape import json_lines, jsonl, stored
from titan_loop.data.prepare.config import Minhash, read_prepare_config
from titan_loop.data.prepare.tokenize_source import tokenize_source
from titan_loop.data.source_card import SourceCard
from titan_loop.errors import UserError

WORDS = [
    first + last
    for first in ["stone", "river", "cloud", "winter", "garden", "market", "silver", "engine"]
    for last in ("", "s", "like", "less", "ward", "ing")
]


def sentence(seed: int, words: int = 60) -> str:
    """Return prose-like words, each sentence with a stop word or two."""
    chosen = np.random.default_rng(seed).choice(WORDS, words).tolist()
    return (
        "The river that will be with "
        + " of ".join(" ".join(chosen[at : at + 6]) for at in range(0, words, 6))
        + "."
    )


def prepare(texts: list[str], config: str, tokenizer: Path, tmp_path: Path, **options: Any):
    for name, part in {"a": texts[0::2], "b": texts[1::2]}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(part))
    (tmp_path / "prepare.toml").write_text(config)
    return tokenize_source(
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl"],
        output=tmp_path / "out",
        tokenizer=tokenizer,
        config=tmp_path / "prepare.toml",
        tasks=2,
        **{"held_out_fraction": 0} | options,
    )


needs_spacy = pytest.mark.skipif(find_spec("spacy") is None, reason="needs the extra `clean`")
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra `clean`")


@needs_spacy
def test_near_duplicates_are_dropped_across_files_and_splits(small_tokenizer, tmp_path, caplog):
    distinct = [sentence(seed) for seed in range(12)]
    # One word of sixty changes: about 5 of 56 five-word shingles, a similarity of 0.84.
    near = [text.replace("The ", "A ", 1).replace(".", "!") for text in distinct[:5]]
    texts = distinct + near + [distinct[6]]
    card = prepare(texts, "[minhash]\n", small_tokenizer, tmp_path, held_out_fraction=0.4)
    assert card.dropped == {"near_duplicate": 6}
    assert card.cleaning == {"language": "eng", "minhash": asdict(Minhash())}
    assert "dropped 6 near_duplicate of 18 records" in caplog.text
    kept = stored(tmp_path / "out") + stored(tmp_path / "out", "held_out")
    assert len(card.splits) == 2
    clusters = [{text, copy} for text, copy in zip(distinct, near, strict=False)]
    clusters += [{text} for text in distinct[5:]]
    assert all(len(cluster & set(kept)) == 1 for cluster in clusters)
    assert len(kept) == 12
    assert not (tmp_path / "out" / "work").exists()


@needs_spacy
@pytest.mark.parametrize(
    ("keys", "kept"), [("", 30), ("norm_numbers = true\nremove_punctuation = true", 1)]
)
def test_numbers_and_operators_count(keys, kept, small_tokenizer, tmp_path):
    numbers = np.random.default_rng(0).integers(10, 99, (30, 20, 2)).tolist()
    sheets = ["\n".join(f"{a} + {b} = {a + b}" for a, b in sheet) for sheet in numbers]
    card = prepare(sheets, f"[minhash]\n{keys}\n", small_tokenizer, tmp_path)
    assert card.dropped == ({"near_duplicate": 30 - kept} if kept < 30 else {})
    assert card.splits["train"].documents == kept


@needs_spacy
def test_copies_of_short_texts_are_dropped(small_tokenizer, tmp_path):
    texts = ["1 + 1 = 2"] * 5 + ["Yes, sir."] * 4 + ["yes,  sír."] + ["!"] * 2
    card = prepare(texts, "[minhash]\n", small_tokenizer, tmp_path, held_out_fraction=0.5)
    assert card.dropped == {"near_duplicate": 9}
    kept = stored(tmp_path / "out") + stored(tmp_path / "out", "held_out")
    assert {text.lower()[0] for text in kept} == {"1", "y", "!"}


@needs_spacy
def test_every_quality_filter_runs(small_tokenizer, tmp_path):
    good = [sentence(seed) + "\n" + sentence(seed + 9) for seed in range(3)]
    bad = {
        "gopher_short_doc": "The few words of this.",
        "dup_line_frac": (sentence(20) + "\n") * 4,
        "line_punct_ratio": "\n".join(sentence(seed)[:-1] for seed in range(30, 33)),
        "lorem_ipsum": sentence(40) + "\nAnd lorem ipsum is here.",
    }
    config = """
        [quality]
        gopher_quality = {}
        gopher_repetition = {}
        fineweb_quality = {}
        c4_quality = {min_num_sentences = 1}
        [minhash]
        n_grams = 4
    """
    card = prepare([*good, *bad.values(), good[0]], config, small_tokenizer, tmp_path)
    assert card.dropped == {**dict.fromkeys(bad, 1), "near_duplicate": 1}
    assert sorted(stored(tmp_path / "out")) == sorted(good)
    assert card == SourceCard.read(tmp_path / "out")
    assert card.versions.keys() == {"titan_loop", "datatrove", "tokenizers", "numpy", "spacy"}


@needs_lm_eval
@needs_spacy
@pytest.mark.parametrize(("keys", "dropped"), [("", 2), ("norm_numbers = true", 22)])
def test_only_the_sheet_with_the_question_is_contaminated(keys, dropped, small_tokenizer, tmp_path):
    question = "12 + 34 + 56 + 78 + 90 + 11 + 13 ="
    fill_in = "The letter ____________ is found in ================ this very sentence of words."
    questions = [{"question": question, "answer": "294"}, {"question": fill_in, "answer": "b"}]
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "tasks" / "questions.jsonl"
    data.write_bytes(json_lines(questions))
    task = {"task": "sums", "output_type": "generate_until", "test_split": "test"}
    task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    task |= {"doc_to_text": "{{question}}\nAnswer:", "doc_to_target": "{{answer}}"}
    (tmp_path / "tasks" / "sums.yaml").write_text(json.dumps(task))
    others = [question.replace("1", str(digit)) for digit in range(20, 40)]
    ruled = ["A heading\n" + "=" * 40 + "\nand text.", "Name: " + "_" * 40 + " Date: " + "_" * 20]
    leaked = [f"Sum: {question} 294", fill_in]
    config = f"[decontaminate]\ntasks = ['sums']\ninclude_path = '{tmp_path / 'tasks'}'\n{keys}\n"
    card = prepare(others + ruled + leaked, config, small_tokenizer, tmp_path)
    assert card.dropped == {"contaminated": dropped}
    assert set(ruled) <= set(stored(tmp_path / "out"))
    assert "lm_eval" in card.versions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is not TOML"),
        ("[minhsh]", "unknown name minhsh; nearest: minhash"),
        ("[quality]\ngopher = {}", "unknown name quality.gopher; nearest: gopher_quality"),
        (
            "[quality]\ngopher_quality = {min_doc_words = '9'}",
            "quality.gopher_quality.min_doc_words = '9' must be a number",
        ),
        ("language = 'egn'\n[minhash]", "language = 'egn' is not a language .* words; nearest: "),
        ("[minhash]\nn_grams = 0", "minhash.n_grams = 0 must be a whole number of at least 1"),
        ("[minhash]\nnum_buckets = 14.0", "num_buckets = 14.0 must be a whole number"),
        ("[minhash]\nseed = -1", "minhash.seed = -1 must be a whole number of at least 0"),
        ("[slurm]\nsbatch_args = '--qos=long'", "slurm.sbatch_args = '--qos=long' must be a table"),
        ("[decontaminate]\nn_grams = 5", r"decontaminate.tasks=\[\] must be a list"),
    ],
)
def test_config_mistakes(text, message, tmp_path):
    (tmp_path / "prepare.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_prepare_config(tmp_path / "prepare.toml")
    (tmp_path / "prepare.toml").write_text("[minhash]\nseed = 0")
    assert read_prepare_config(tmp_path / "prepare.toml").minhash == Minhash(seed=0)
