"""The ladder as a pure function: counts, windows, rungs, and its state."""

import json

from titan_loop.training.stability.ladder import Ladder, SkippedStep, jumped_windows


def step(number: int) -> SkippedStep:
    return SkippedStep(number, 8 * number, 8 * number + 8)


def test_only_skips_within_the_window_count_together():
    ladder = Ladder(window=10, skips=2, rewinds=1)
    assert ladder.note(step(1)) == "skip"
    assert ladder.note(step(11)) == "skip"
    assert ladder.note(step(20)) == "rewind"
    assert [s.step for s in ladder.skipped] == [11, 20]


def test_rungs_come_in_their_order_and_a_saved_state_goes_on():
    ladder = Ladder(window=10, skips=1, rewinds=2, halve=True)
    decisions = []
    for number in range(4):
        decision = ladder.note(step(20 + number))
        decisions.append(decision)
        if decision != "stop":
            ladder.go_back(decision, to_step=16, manifest_sha256="abc")
        again = Ladder(window=10, skips=1, rewinds=2, halve=True)
        again.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
        assert again == ladder
        ladder = again
    assert decisions == ["rewind", "rewind", "halve", "stop"]
    assert ladder.halved
    assert ladder.went_to == [16, 16, 16]
    assert jumped_windows(ladder.jumps) == [(160, 168), (168, 176), (176, 184)]
    assert [jump["steps"] for jump in ladder.jumps] == [[20], [21], [22]]


def test_windows_that_touch_are_one_range():
    ladder = Ladder(window=64, skips=9, rewinds=0)
    for number in (5, 3, 4, 9):
        ladder.note(step(number))
    assert ladder.windows() == [(24, 48), (72, 80)]


def test_without_rewinds_the_bound_ends_the_run():
    ladder = Ladder(window=64, skips=2, rewinds=0)
    assert [ladder.note(step(n)) for n in (1, 2)] == ["skip", "stop"]
