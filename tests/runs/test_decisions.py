"""The table of decisions about spikes."""

from titan_loop.runs.decisions import decision_rows

SKIP = {
    "step": 7,
    "windows": [[0, 4], [8, 9]],
    "loss": 5.1234,
    "loss_bound": 3.0,
    "grad_norm": None,
    "decision": "skip",
}
REWIND = {"step": 9, "windows": [[4, 8]], "decision": "rewind", "to_step": 3, "began": "update"}
STOP = {"step": 11, "windows": [], "decision": "stop", "grad_norm": 0.5}


def test_a_row_for_each_decision():
    header, *rows = decision_rows([SKIP, REWIND, STOP, {**STOP, "decision": "other"}])
    assert header[:2] == ["step", "windows"]
    assert rows == [
        ["7", "0–3, 8–8", "5.12 (3)", "not finite", "", "update skipped"],
        ["9", "4–7", "", "", "update", "back to step 3, over these windows"],
        ["11", "", "", "0.5", "", "stopped, exit code 4"],
        ["11", "", "", "0.5", "", "other"],
    ]
    assert decision_rows([]) == [header]
