"""Claims about looping itself, and the results that show them or do not."""

from ..claims import bits_claim, text_cell

_DEPTH = "bash tools/depth_pays.sh"

CLAIMS = [
    *(
        bits_claim(
            text=f"text: gain of R = 4 over {other}, Muon",
            recipe="depth_pays_tuned",
            cells=[text_cell(stage, 1), text_cell("looped_2e-2", 4)],
            at_least=least,
            command=f"{_DEPTH} --tuned",
            note="each at the best of five rates apart by 2, on seeds 1 and 2 of the five (search "
            f"partly on an H200); {note}",
        )
        for stage, other, least, note in (
            (
                "not_looped_2e-2",
                "R = 1, equal parameters and tokens",
                0.08,
                "2.9 times the FLOPs; at one rate, chosen on R = 4, 0.140 [0.018, 0.262], with "
                "AdamW 0.068 [0.042, 0.095] (`depth_pays`)",
            ),
            (
                "same_text_1e-2",
                "R = 1 that reads the same text 2.9 times, equal FLOPs",
                0,
                "8.6M tokens read, 3.0M of them different",
            ),
            (
                "more_text_1e-2",
                "R = 1 on 2.9 times the text, equal FLOPs",
                0,
                "the same ten runs on an H200 (`depth_pays_tuned_h200`): 0.054 [0.023, 0.084]; "
                "prose alone: -0.009 [-0.037, 0.020]",
            ),
            ("two_layers_1e-2", "two layers, equal tokens", 0, "1.8 times the FLOPs"),
            (
                "two_layers_more_1e-2",
                "two layers on 1.8 times the text, equal FLOPs",
                0,
                "two layers at the best of three rates instead",
            ),
            (
                "four_layers_5e-3",
                "four layers, equal tokens and FLOPs",
                0,
                "a quarter of the layers, 0.48 of the parameters; four layers at 1e-2: "
                "-0.039 [-0.099, 0.022]",
            ),
        )
    ),
    bits_claim(
        text="text: 8 steps minus 4, where the last fifth of training alternates between them",
        recipe="depth_pays_again",
        cells=[text_cell("late_8_muon", 8), text_cell("late_8_muon", 4)],
        at_most=0.01,
        command=f"{_DEPTH} --again late_8_muon",
        note="training includes 8 steps; nothing is shown beyond that; a first training on another "
        "corpus, from uncommitted code: 0.008 [0.006, 0.011]",
    ),
    bits_claim(
        text="text: price of the exit gate at R = 4, Muon",
        recipe="depth_pays",
        cells=[text_cell("looped_muon", 4), text_cell("last_step_muon", 4)],
        at_most=0.01,
        command=_DEPTH,
        note="at 1.4 times the FLOPs; the rate was chosen on R = 4; with AdamW 0.024 [0.005, "
        "0.044]",
    ),
    bits_claim(
        text="text: the same price, each at its best rate",
        recipe="depth_pays_tuned_again",
        cells=[text_cell("every_step_2e-2", 4), text_cell("looped_2e-2", 4)],
        at_most=0.01,
        command=f"{_DEPTH} --tuned --again every_step_2e-2 looped_2e-2",
        note="the gate's rate is the better of two, on seed 1; on the corpus of 2026-11-30",
    ),
]
