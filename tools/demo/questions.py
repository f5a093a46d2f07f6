"""Ask the quick start's two models of arithmetic the same questions, and count who is right.

    python -m tools.demo.questions LOOPED NOT_LOOPED

Questions have four operations and were held out of training. The looped model is also read after
each of its visits.
"""

import sys

import torch
from torch import Tensor

import titan_loop
from titan_loop.data.tasks.mano import OPERATORS
from titan_loop.evaluation.intervals import of_questions
from titan_loop.tables import columns
from train_configs.quickstart.recipes import ARITHMETIC as TASK

QUESTIONS, SHOWN = 1_000, 8
BAR = 40  # characters of 100 %
DIGITS = [*map(str, range(TASK.modulus))]
SYMBOLS = dict(enumerate([*OPERATORS, *DIGITS], start=2))  # by token id


def answers(run: str, prompts_QL: Tensor) -> Tensor:
    """Return the most likely answer (R, Q) after each step, as token ids."""
    return titan_loop.load(run).states(prompts_QL).logits_RBLV[:, :, -1].argmax(-1).cpu()


def written(prompt: list[int]) -> str:
    """Return a question as people write it, for example (4 * 3) - 1."""
    text, *rest = (SYMBOLS[token] for token in prompt[2:-1])
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        text = f"{text if text in DIGITS else f'({text})'} {operator} {operand}"
    return text


def main(looped: str, not_looped: str) -> None:
    """Print some questions with both answers, and the share of right ones of all."""
    ((_, exam),) = TASK.exam(QUESTIONS).items()
    tokens_QL = torch.tensor([example.tokens.tolist() for example in exam])
    prompts_QL, right_Q = tokens_QL[:, :-1], tokens_QL[:, -1]
    once_Q, visits_RQ = answers(not_looped, prompts_QL)[0], answers(looped, prompts_QL)

    def shown(given_Q: Tensor, at: int) -> str:
        verdict = "right" if given_Q[at] == right_Q[at] else "wrong"
        return f"{SYMBOLS.get(int(given_Q[at]), '?')} {verdict}"

    rows = [(f"modulo {TASK.modulus}", "is", "1 visit", f"{len(visits_RQ)} visits")]
    for at, prompt in enumerate(prompts_QL[:SHOWN].tolist()):
        right = SYMBOLS[int(right_Q[at])]
        rows.append((written(prompt), right, shown(once_Q, at), shown(visits_RQ[-1], at)))
    print(*columns(rows, left=(0,)), sep="\n", end="\n\n")

    shares = [("guessing", 1 / TASK.modulus, "")]
    readings = [("1 visit, trained on four times as many questions", once_Q)]
    readings += [
        (f"{len(visits_RQ)} visits, read after {step}", given_Q)
        for step, given_Q in enumerate(visits_RQ, 1)
    ]
    for name, given_Q in readings:
        share = float((given_Q == right_Q).float().mean())
        _, low, high = of_questions(share, QUESTIONS)
        shares.append((name, share, f"[{low:.0%}, {high:.0%}]"))
    print(f"of {QUESTIONS:,} questions, with 95 % intervals:")
    for name, share, spread in shares:
        print(f"{name:<52}{share:4.0%} {spread:<11} {'█' * round(BAR * share)}".rstrip())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tools.demo.questions LOOPED NOT_LOOPED")
    main(*sys.argv[1:])
