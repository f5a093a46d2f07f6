"""Evaluating a run: what is missing is one line, and no source is mistaken for the total."""

from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.evaluation.evaluate_run import evaluate_run, name_of_total
from titan_loop.runs.run_directory import RunDirectory


def test_the_total_never_replaces_a_source():
    assert name_of_total(["code", "prose"]) == "all"
    assert name_of_total(["code", "all"]) == "(all)"
    assert name_of_total(["all", "(all)"]) == "((all))"


def test_a_run_without_config_is_one_line(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.create_or_open([])
    with pytest.raises(UserError, match=r"has no config\.json"):
        evaluate_run(run, depths=[1])


def test_checkpoints_are_looked_for_where_the_config_puts_them(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.create_or_open([], {"dataloader": {"mixture": ["a=1"]}, "checkpoint": {"folder": "mine"}})
    with pytest.raises(UserError, match="mine has no committed checkpoint"):
        evaluate_run(run, depths=[1])
