"""Tasks that need no network: drawn from a fixed seed, or shipped with lm-evaluation-harness.

    mano        value of a held-out prefix expression mod 23 with three operations; 23 choices
    multi_hop   the A of the B of C, with the facts in the prompt; the choices are all people named
    mmlu_dev    the MMLU dev questions that the harness ships, zero-shot; 4 choices: a smoke test,
                since these very questions are in everybody's few-shot prompts

Each is a config that the harness' task manager loads like one of its own. A fourth offline task,
`held_out`, bypasses the harness (`window_scores.py`).

Source: Mano and multi-hop QA after Zhu et al. 2025 (Ouro), arXiv 2510.25741, §6 and Appendix B.
Deviations: the paper trains on these tasks. Here they are asked of a model trained on text, so
Mano's prompts have solved examples, and multi-hop's have the facts.
"""

import itertools
import json
import random
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from titan_loop.data.tasks.mano import Mano
from titan_loop.errors import UserError

HELD_OUT = "held_out"
MODULUS = 23
_MANO_OPERATIONS = 3
_MANO_SHOTS = 4
_QUESTIONS = 200
_HOPS = 2
_DISTRACTORS = 4
_NAMES = (
    "Ada Ben Cleo Dan Eve Finn Gwen Hugo Iris Jack Kate Liam Mia Noah Olga Paul Rosa Sam Tess Uma "
    "Vera Will Yara Zoe"
)
_RELATIONS = "aunt boss coach doctor friend guide host judge mentor nurse pilot"

_MMLU_FILE = "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
_MMLU_SPLIT = re.compile(r"(?:^|\n)Q: ")
_MMLU_QUESTION = re.compile(
    r"(?P<question>.*)\n"
    r"\(A\) ?(?P<a>.*?) ?\(B\) ?(?P<b>.*?) ?\(C\) ?(?P<c>.*?) ?\(D\) ?(?P<d>.*?)\nA: "
    r".*answer is \((?P<answer>[ABCD])\)",
    re.DOTALL,
)


def mano_documents() -> list[dict[str, Any]]:
    """Return held-out expressions, each after the same solved ones."""
    mano = Mano(MODULUS, _MANO_OPERATIONS)
    drawn = mano.held_out_questions(_QUESTIONS + _MANO_SHOTS, _MANO_OPERATIONS)
    lines = [
        f"len_{question.operations} {' '.join(map(str, question.expression))} ="
        for question in drawn
    ]
    shown = zip(lines[:_MANO_SHOTS], drawn[:_MANO_SHOTS], strict=True)
    head = f"Prefix expressions modulo {MODULUS}, with their number of operations and value.\n"
    head += "".join(f"{line} {question.answer}\n" for line, question in shown)
    choices = [str(value) for value in range(MODULUS)]
    return [
        {"text": head + line, "choices": choices, "answer": question.answer}
        for line, question in zip(lines[_MANO_SHOTS:], drawn[_MANO_SHOTS:], strict=True)
    ]


def multi_hop_documents() -> list[dict[str, Any]]:
    """Return questions over a chain of relations, with its facts and others in random order."""
    generator = random.Random(0)
    documents = []
    for _ in range(_QUESTIONS):
        people = generator.sample(_NAMES.split(), _HOPS + 1 + 2 * _DISTRACTORS)
        relations = generator.sample(_RELATIONS.split(), _HOPS)
        chain, others = people[: _HOPS + 1], people[_HOPS + 1 :]
        pairs = [*itertools.pairwise(chain), *zip(others[::2], others[1::2], strict=True)]
        facts = [
            # Distractors have the question's relations, so that these do not give the answer away.
            f"The {relations[index % _HOPS]} of {one} is {other}."
            for index, (one, other) in enumerate(pairs)
        ]
        generator.shuffle(facts)
        asked = " of the ".join(reversed(relations))
        text = "\n".join([*facts, f"Who is the {asked} of {chain[0]}?", "Answer:"])
        choices = sorted(people)
        documents.append({"text": text, "choices": choices, "answer": choices.index(chain[-1])})
    return documents


def mmlu_dev_documents() -> list[dict[str, Any]]:
    """Return the dev questions inside the harness' chain-of-thought prompts."""
    try:
        prompts = json.loads(files("lm_eval").joinpath(_MMLU_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        problem = f"mmlu_dev: this lm_eval has no {_MMLU_FILE}; install lm-eval==0.4.13"
        raise UserError(problem) from error
    documents = []
    for subject, prompt in prompts.items():
        for part in _MMLU_SPLIT.split(prompt)[1:]:
            match = _MMLU_QUESTION.match(part)
            if match is None:
                continue
            options = "\n".join(f"{letter.upper()}. {match[letter]}" for letter in "abcd")
            text = f"{match['question'].strip()}\n{options}\nAnswer:"
            answer = "ABCD".index(match["answer"])
            document = {"text": text, "choices": list("ABCD"), "answer": answer, "subject": subject}
            documents.append(document)
    return documents


OFFLINE_TASKS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "mano": mano_documents,
    "multi_hop": multi_hop_documents,
    "mmlu_dev": mmlu_dev_documents,
}


def offline_config(name: str) -> dict[str, Any]:
    """Return one of `OFFLINE_TASKS` as a config that the harness' task manager loads."""
    make_documents = OFFLINE_TASKS[name]

    def make_dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(make_documents())}

    return {
        "task": name,
        "custom_dataset": make_dataset,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "num_fewshot": 0,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in ("acc", "acc_norm")
        ],
        "metadata": {"version": 1},
    }
