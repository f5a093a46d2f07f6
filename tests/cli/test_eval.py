"""`titan-loop eval`: its table, its verdicts, and refused flags."""

from pathlib import Path

import pytest

from tests.support.command_lines import refused
from titan_loop.cli.main import main


def test_held_out_text_is_scored_at_six_depths_and_may_have_to_beat_a_baseline(text_run, capsys):
    words = ["eval", str(text_run), "--windows", "2"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert [f"R = {depth}" in printed for depth in range(1, 8)] == [True] * 6 + [False]
    assert f"titan-loop report {text_run} makes a page" in printed
    assert main([*words, "--depths", "4", "--beats-bigram", "0.99"]) == 1
    captured = capsys.readouterr()
    assert "R = 4 (trained)" in captured.out
    assert "the bigram model's" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beats-unigram 0", "--beats-unigram 0.0 must lie between 0 and 1"),
        ("--tasks offline --beats-bigram 0.5", "--beats-bigram needs held-out text: leave out"),
        ("--frontier --beats-unigram 0.5", "--beats-unigram needs held-out text"),
        ("--tasks offline --frontier --ema", "--frontier draws the weights of training"),
        ("--windows 0", "windows=0 must be at least 1"),
        ("--tasks ,", "no task was named"),
        ("--limit 3", "limit=3 has no effect on held-out text; leave it out, or name other tasks"),
        ("--tasks held_out --kv-cache last", "kv_cache=last has no effect on held-out text"),
        ("--tasks mano --windows 2", "windows=2 has no effect without held-out text; leave it out"),
        ("--tasks mano,multi_hop --seq-len 9", "seq_len=9 has no effect without held-out text"),
    ],
)
def test_flags_that_do_not_go_together(text_run: Path, capsys, words: str, message: str):
    assert message in refused(capsys, "eval", text_run, *words.split())
