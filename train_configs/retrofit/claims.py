"""Claims about retrofits, and the results that show them or do not."""

from ..claims import Cell, Claim, bits_claim, text_cell


def _hops(stage: str, hops: int, steps: int, task: str = "english") -> Cell:
    return Cell(stage=stage, name=f"{task}_hops/{hops}_hops/acc,none/static:{steps}")


_RETROFIT = "bash tools/retrofit.sh"
_H200 = "on an H200"
_MIXED = "loops on an H200, uncompiled, the dense model on a core"
_ONE_CORE = "on one core; tried after 6-11 had missed"

CLAIMS = [
    *(
        bits_claim(
            text=f"SmolLM2-135M, layers {span} looped, {mode}, R = {steps}, minus the dense model",
            recipe="retrofit_smollm2",
            cells=[text_cell(f"{mode}{suffix}", steps), text_cell("source", 1)],
            at_most=most,
            command=_RETROFIT,
            note="above 0: worse than the dense model after the same 65,536 tokens; 1.09 to 1.16 "
            f"times its FLOPs; {ran}",
        )
        for span, suffix, ran in (
            ("6-11", "", _MIXED),
            ("12-15", "_four", _ONE_CORE),
        )
        for mode in ("identity", "plain", "damped")
        for steps, most in ((1, 0.01), (2, 0.02))
    ),
    Claim(
        text="SmolLM2-135M with half of its layers: share of the loss caused by tying that "
        "adapters of rank 64 and distillation recover",
        theirs="nearly all, after 60B tokens",
        recipe="retrofit_smollm2",
        cells=[
            text_cell("tied_rank0", 2),
            text_cell("tied_rank64_distilled", 2),
            text_cell("source", 1),
        ],
        at_least=50,
        command=_RETROFIT,
        note="Bae et al. 2024, arXiv 2410.20672; 65,536 tokens; distillation alone recovers "
        f"5.0 %; {_MIXED}",
    ),
    *(
        Claim(
            text=f"{hops}-hop questions, trained on up to 3 hops: SmolLM2-135M looped, R = {steps}"
            ", minus the dense model",
            theirs="31 points",
            recipe="retrofit_rules",
            cells=[_hops("identity", hops, steps), _hops("source", hops, 1)],
            at_least=20,
            unit="points",
            command=f"{_RETROFIT} --rules",
            note="no conclusion on extrapolation: even of three hops, which were taught, no arm "
            "answers more than chance (8 %) on average; Shapiro 2026, arXiv 2608.11233: depths 1 "
            f"to 14; {_H200}",
            is_test=False,
        )
        for hops, steps in ((4, 4), (5, 6))
    ),
    *(
        Claim(
            text=f"{hops}-hop questions with the facts in the prompt, trained on up to 3 hops: "
            f"SmolLM2-135M looped, R = {steps}, minus the dense one",
            theirs="31 points",
            recipe="retrofit_told",
            cells=[_hops("identity", hops, steps, "told"), _hops("source", hops, 1, "told")],
            at_least=20,
            unit="points",
            command=f"{_RETROFIT} --told",
            is_test=False,
            note="no conclusion on extrapolation: both models answer 3 of 48 questions of the two "
            "and three hops taught (chance: 6 of 48); Shapiro 2026, arXiv 2608.11233: over a "
            "scratchpad, depths 1 to 14",
        )
        for hops, steps in ((4, 4), (5, 6))
    ),
]
