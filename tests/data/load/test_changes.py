"""Phrases for the differences between two descriptions of data."""

import pytest

from titan_loop.data.load.changes import data_changes, match_sources


def source(path: str, contents: str | None = None, share: float = 0.5) -> dict:
    return {"path": path, "contents": contents or f"of {path}", "share": share}


A, B, C = source("a"), source("b"), source("c")


@pytest.mark.parametrize(
    ("saved", "here", "matches"),
    [
        ([A, B], [A, B], [0, 1]),
        ([A, B], [B, A], [1, 0]),
        ([A, B], [A, C], [0, None]),
        ([A], [source("moved", "of a")], [0]),
        ([A], [source("a", "rewritten")], [0]),
        # The path counts first: the copy of a is new, although it has a's contents.
        ([A], [source("copy", "of a"), A], [None, 0]),
        ([A, source("a2", "of a")], [source("x", "of a"), source("y", "of a")], [0, 1]),
        ([], [A], [None]),
    ],
)
def test_a_source_is_known_by_its_path_or_else_its_contents(saved, here, matches):
    assert match_sources(saved, here) == matches


@pytest.mark.parametrize(
    ("saved", "here", "changes"),
    [
        ({"seed": 0, "sources": [A, B]}, {"seed": 0, "sources": [A, B]}, []),
        ({"seq_len": 8}, {"seq_len": 16}, ["training.seq_len 8 → 16"]),
        ({"seed": 0}, {"seed": 1, "task": "x"}, ["dataloader.seed 0 → 1", "task None → x"]),
        ({"sources": []}, {"sources": [source("c", share=0.25)]}, ["source c is new (share 0.25)"]),
        ({"sources": [A, B]}, {"sources": [B]}, ["source a is gone"]),
        ({"sources": [A, B]}, {"sources": [B, A]}, ["the sources are in another order"]),
        ({"sources": [A]}, {"sources": [source("moved", "of a")]}, []),
        (
            {"sources": [A, B]},
            {"sources": [source("a", "other", 0.75), B]},
            ["source a: contents of a → other, share 0.5 → 0.75"],
        ),
    ],
)
def test_one_phrase_for_each_difference(saved, here, changes):
    assert data_changes(saved, here) == changes
