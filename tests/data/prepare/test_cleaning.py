"""Deduplication, quality filters and decontamination, on documents that must and must not go."""

import functools
import json
import re
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_loop.data.inspect_source import show_source
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
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "prepare.toml").write_text(config)
    card = tokenize_source(
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl"],
        output=tmp_path / "out",
        tokenizer=tokenizer,
        config=tmp_path / "prepare.toml",
        tasks=2,
        **{"held_out_fraction": 0} | options,
    )
    assert card is not None
    return card


def stored(source: Path, split: str = "train") -> list[str]:
    shown = show_source(source, count=999, split=split)
    return sorted(document.text.removesuffix("<|endoftext|>") for document in shown)


needs_spacy = pytest.mark.skipif(find_spec("spacy") is None, reason="needs the extra `clean`")
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra `clean`")


@needs_spacy
def test_near_duplicates_are_dropped_across_files_and_splits(
    small_tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def sheets(count: int) -> list[str]:
    random = np.random.default_rng(0)
    numbers = random.integers(10, 99, (count, 20, 2)).tolist()
    return ["\n".join(f"{a} + {b} = {a + b}" for a, b in sheet) for sheet in numbers]


def functions(count: int) -> list[str]:
    random = np.random.default_rng(0)
    signs = random.choice(
        ["+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>"], (count, 5)
    ).tolist()
    numbers = random.integers(0, 90, (count, 2)).tolist()
    return [
        f"def f(x, y):\n  a = x {s[0]} y\n  b = a {s[1]} {n}\n  for i in range({m}):\n"
        f"    b = b {s[2]} (a {s[3]} i)\n  return b {s[4]} a\n"
        for s, (n, m) in zip(signs, numbers, strict=True)
    ]


@needs_spacy
@pytest.mark.parametrize(
    ("texts", "keys", "kept"),
    [
        (sheets(300), "", 300),
        (sheets(300), "norm_numbers = true\nremove_punctuation = true", 1),
        (functions(200), "", 200),
        (functions(200), "norm_numbers = true\nremove_punctuation = true", 1),
    ],
)
def test_numbers_and_operators_count(
    texts: list[str], keys: str, kept: int, small_tokenizer: Path, tmp_path: Path
) -> None:
    assert len(set(texts)) == len(texts)
    card = prepare(texts, f"[minhash]\n{keys}\n", small_tokenizer, tmp_path)
    near = len(texts) - card.splits["train"].documents
    assert card.dropped == ({"near_duplicate": near} if near else {})
    # Two functions of these differ in so little that they are near-duplicates.
    assert card.splits["train"].documents == pytest.approx(kept, abs=1)


@needs_spacy
def test_copies_of_short_texts_are_dropped(small_tokenizer: Path, tmp_path: Path) -> None:
    texts = ["1 + 1 = 2"] * 5 + ["Yes."] * 4 + ["yes."] + ["!"] * 2
    card = prepare(texts, "[minhash]\n", small_tokenizer, tmp_path, held_out_fraction=0.5)
    assert card.dropped == {"near_duplicate": 8}
    kept = stored(tmp_path / "out") + stored(tmp_path / "out", "held_out")
    assert sorted(kept) == sorted(set(texts))


@needs_spacy
def test_other_keys_are_other_settings(small_tokenizer: Path, tmp_path: Path) -> None:
    prepare([sentence(0)], "[minhash]\n", small_tokenizer, tmp_path)
    unfinished = tmp_path / "out" / "preparation.json"
    (tmp_path / "out" / "source.json").unlink()
    with pytest.raises(UserError, match=r"unfinished with other settings \(cleaning\): give"):
        prepare([sentence(0)], "[minhash]\nnorm_numbers = true\n", small_tokenizer, tmp_path)
    settings = json.loads(unfinished.read_text())
    settings["cleaning"]["minhash"] = {}  # of a version that knew no such keys
    unfinished.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"unfinished with other settings \(cleaning\): give"):
        prepare([sentence(0)], "[minhash]\n", small_tokenizer, tmp_path)


@needs_spacy
def test_quality_filters_come_before_deduplication(small_tokenizer: Path, tmp_path: Path) -> None:
    good = [sentence(seed) for seed in range(3)]
    short = "The few words of this."
    hashes = sentence(9) + " #" * 30
    config = """
        [quality]
        gopher_quality = {min_doc_words = 20}
        [minhash]
        n_grams = 4
    """
    card = prepare([*good, short, hashes, good[0]], config, small_tokenizer, tmp_path)
    assert card.dropped == {
        "gopher_short_doc": 1,
        "gopher_too_many_hashes": 1,
        "near_duplicate": 1,
    }
    assert stored(tmp_path / "out") == sorted(good)
    assert card == SourceCard.read(tmp_path / "out")
    assert card.versions.keys() == {"titan_loop", "datatrove", "tokenizers", "numpy", "spacy"}


@needs_spacy
def test_every_quality_filter_runs(small_tokenizer: Path, tmp_path: Path) -> None:
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
    """
    card = prepare([*good, *bad.values()], config, small_tokenizer, tmp_path)
    assert card.dropped == dict.fromkeys(bad, 1)
    assert stored(tmp_path / "out") == sorted(good)


def mmlu_questions() -> list[dict[str, str]]:
    """Return MMLU development questions that ship with lm-evaluation-harness."""
    import lm_eval.tasks

    (folder,) = lm_eval.tasks.__path__
    prompts = json.loads((Path(folder) / "mmlu/flan_cot_fewshot/_cot_prompts.json").read_text())
    found = []
    for prompt in prompts.values():
        for question, options, answer in re.findall(
            r"\nQ: (.*?)\n(\(A\).*?)\nA: .*?The answer is \(([A-D])\)", prompt, flags=re.DOTALL
        ):
            choices = re.split(r"\s*\([A-D]\)\s*", options)[1:]
            if len(choices) == 4 and len(question.split()) > 20:
                found.append({"question": question, "answer": choices["ABCD".index(answer)]})
    return found


def write_task(tasks: Path, name: str, questions: list[dict[str, str]]) -> Path:
    """Write an evaluation task of one's own; return its data file."""
    tasks.mkdir()
    data = tasks / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tasks / f"{name}.yaml").write_text(
        f"""
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
"""
    )
    return data


@needs_lm_eval
@needs_spacy
@pytest.mark.parametrize(("keys", "dropped"), [("", 2), ("norm_numbers = true", 22)])
def test_only_the_sheet_with_the_question_is_contaminated(
    keys: str, dropped: int, small_tokenizer: Path, tmp_path: Path
) -> None:
    question = "12 + 34 + 56 + 78 + 90 + 11 + 13 ="
    fill_in = "The letter ____________ is found in ================ this very sentence of words."
    questions = [{"question": question, "answer": "294"}, {"question": fill_in, "answer": "b"}]
    write_task(tmp_path / "tasks", "sums", questions)
    others = [question.replace("1", str(digit)) for digit in range(20, 40)]
    ruled = ["A heading\n" + "=" * 40 + "\nand text.", "Name: " + "_" * 40 + " Date: " + "_" * 20]
    leaked = [f"Sum: {question} 294", fill_in]
    config = f"[decontaminate]\ntasks = ['sums']\ninclude_path = '{tmp_path / 'tasks'}'\n{keys}\n"
    card = prepare(others + ruled + leaked, config, small_tokenizer, tmp_path)
    assert card.dropped == {"contaminated": dropped}
    assert set(ruled) <= set(stored(tmp_path / "out"))


@needs_lm_eval
@needs_spacy
def test_documents_with_evaluation_questions_are_dropped(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    questions = mmlu_questions()[:40]
    assert len(questions) == 40
    tasks = tmp_path / "tasks"
    data = write_task(tasks, "local_mmlu", questions)
    clean = [sentence(seed) for seed in range(4)]
    leaked = [
        f"{clean[0]} Found in an exam: {questions[3]['question'].upper()} {clean[1]}",
        f"{questions[7]['question']}\nAnswer: {questions[7]['answer']}",
    ]
    config = f"""
        [decontaminate]
        tasks = ["local_mmlu"]
        include_path = "{tasks}"
    """
    card = prepare([*clean, *leaked], config, small_tokenizer, tmp_path)
    assert card.dropped == {"contaminated": 2}
    assert stored(tmp_path / "out") == sorted(clean)
    assert "lm_eval" in card.versions

    from titan_loop.data.prepare.config import Decontamination
    from titan_loop.data.prepare.decontamination import build_ngram_index

    def settings(**options: Any) -> Decontamination:
        return Decontamination(**{"tasks": ["local_mmlu"], "include_path": str(tasks)} | options)

    # Without query n-grams a question alone is no leak, so fewer n-grams count.
    every = build_ngram_index(settings(), tmp_path / "index", "eng")["local_mmlu"]
    fewer = build_ngram_index(settings(query_ngrams=False), tmp_path / "answers", "eng")
    assert 0 < fewer["local_mmlu"] < every
    with pytest.raises(UserError, match="no question of 400 words"):
        build_ngram_index(settings(n_grams=400), tmp_path / "x", "eng")
    data.unlink()
    with pytest.raises(UserError, match=r"local_mmlu cannot be loaded .*: check the network"):
        build_ngram_index(settings(), tmp_path / "x", "eng")


@needs_lm_eval
@needs_spacy
def test_an_unknown_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import tasks

    from titan_loop.data.prepare.config import Decontamination
    from titan_loop.data.prepare.decontamination import build_ngram_index

    # Listing the thousands of tasks the harness brings along takes many seconds.
    known_only = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", known_only)
    (tmp_path / "hellaswag.yaml").write_text("task: hellaswag\ndataset_path: json\n")
    settings = Decontamination(tasks=["helaswag"], include_path=str(tmp_path))
    with pytest.raises(UserError, match=r"has no 'helaswag'; nearest: hellaswag"):
        build_ngram_index(settings, tmp_path / "index", "eng")


@needs_spacy
def test_chats_are_cleaned_as_text(small_tokenizer: Path, tmp_path: Path) -> None:
    records = [{"question": sentence(seed), "answer": sentence(seed + 50)} for seed in range(4)]
    records.append(records[2])
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = tmp_path / "prepare.toml"
    config.write_text("[minhash]\n")
    options = {"tokenizer": small_tokenizer, "chat": True, "config": config}
    card = tokenize_source(path, output=tmp_path / "out", held_out_fraction=0, **options)
    assert card is not None
    assert card.dropped == {"near_duplicate": 1}
    assert card.splits["train"].documents == 4
    config.write_text("[quality]\nc4_quality = {}\n")
    with pytest.raises(UserError, match="c4_quality rewrites texts, which chats do not allow"):
        tokenize_source(path, output=tmp_path / "b", **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is not TOML"),
        ("[minhsh]", "unknown name minhsh; nearest: minhash"),
        ("language = 5", "language = 5 must be a str"),
        ("minhash = true", "minhash = True must be a dict"),
        ("[quality]\ngopher = {}", "unknown name quality.gopher; nearest: gopher_quality"),
        ("[quality]\ngopher_quality = true", r"quality.gopher_quality = True must be a table"),
        (
            "[quality]\ngopher_quality = {min_words = 1}",
            "unknown name quality.gopher_quality.min_words; nearest: min_doc_words",
        ),
        (
            "[quality]\ngopher_quality = {min_doc_words = '9'}",
            "quality.gopher_quality.min_doc_words = '9' must be a number",
        ),
        (
            "[quality]\ngopher_repetition = {top_n_grams = 2}",
            "quality.gopher_repetition.top_n_grams = 2 must be a list",
        ),
        ("language = 'egn'\n[minhash]", "language = 'egn' is not a language .* words; nearest: "),
        ("[decontaminate]\ntasks = ['a']\ninclude_path = 3", "include_path = 3 must be a string"),
        (
            "[decontaminate]\ntasks = ['a']\nquery_ngrams = 'no'",
            "decontaminate.query_ngrams = 'no' must be true or false",
        ),
        ("[minhash]\nngrams = 5", "unknown name minhash.ngrams; nearest: n_grams"),
        ("[minhash]\nnorm_numbers = 1", "minhash.norm_numbers = 1 must be true or false"),
        ("[minhash]\nremove_punct = true", "remove_punct; nearest: remove_punctuation"),
        (
            "[decontaminate]\ntasks = ['a']\nnorm_numbers = 'no'",
            "decontaminate.norm_numbers = 'no' must be true or false",
        ),
        ("[minhash]\nn_grams = 0", "minhash.n_grams = 0 must be a positive whole number"),
        ("[decontaminate]\nn_grams = 5", "decontaminate.tasks=None must be a list"),
        ("[decontaminate]\ntasks = ['a']\nn_grams = '5'", "decontaminate.n_grams = '5' must be"),
        ("[decontaminate]\ntasks = ['a']\ntask = 1", "unknown name decontaminate.task; nearest"),
    ],
)
def test_config_mistakes(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prepare.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_prepare_config(tmp_path / "prepare.toml")
