"""The exam of a generated task: what answering token by token gives, on one process and on two."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from tests.data.tasks.toy_run import TASK, toy_config
from tests.evaluation.runs import ask_untrained
from tests.inference.reference import make_model
from titan_loop.cli.main import main
from titan_loop.errors import UserError
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.exam import Exam
from titan_loop.evaluation.intervals import of_questions
from titan_loop.evaluation.readings import depth_readings, policy_reading
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.window_scores import at_readings, sum_windows
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl

CPU = torch.device("cpu")
DEPTHS = [1, 3]
ROOM = 32


def decoded_accuracy(model: Any, depth: int) -> dict[str, float]:
    """Answer every question token by token, each time with a pass over what there is so far."""
    right: dict[str, list[bool]] = defaultdict(list)
    for stratum, examples in TASK.exam(40).items():
        for example in examples:
            *prompt, _ = example.tokens.tolist()
            del prompt[int(example.answer.argmax()) + 1 :]
            expected = example.labels[example.answer].tolist()
            for _ in expected:
                with torch.no_grad():
                    output = model(torch.tensor([prompt]), recurrent_steps=depth)
                prompt.append(int(model.readout(output.hidden_RBLD[-1])[0, -1].argmax()))
            right[f"{TASK.name}/{stratum}"].append(prompt[-len(expected) :] == expected)
    return {name: sum(values) / len(values) for name, values in right.items()}


def test_it_equals_greedy_decoding_at_every_depth():
    """Of the untrained models with seeds below 25 the one that is right most often by chance."""
    model = make_model(seed=13, vocab_size=TASK.vocab_size)
    exam = Exam(TASK, 40, vocab_size=TASK.vocab_size, room=ROOM)
    readings = [*depth_readings(DEPTHS), policy_reading("q:0.5", 3)]
    names = [reading.name for reading in readings]
    right = at_readings(model, readings, value="right_PT")
    read = exam.grade(names, lambda windows: sum_windows(windows, right, device=CPU))
    assert list(read) == [f"backwards/{n}_letters" for n in (1, 2, 3)]
    for depth in DEPTHS:
        for name, accuracy in decoded_accuracy(model, depth).items():
            metrics = {**read[name][f"static:{depth}"].metrics}
            assert metrics.pop("acc,none") == accuracy
            bounds = metrics.pop("acc,none_low"), metrics.pop("acc,none_high")
            questions = len(exam.windows[name].labels)
            assert bounds == of_questions(accuracy, questions)[1:]
            assert [*metrics] == ["labels_acc,none"] * (not name.endswith("1_letters"))
            assert all(accuracy <= share <= 1 for share in metrics.values())
            assert read[name][f"static:{depth}"].mean_steps == depth
    for name in ("backwards/1_letters", "backwards/3_letters"):
        assert all(0 < result.metrics["acc,none"] < 1 for result in read[name].values())
    assert 1 <= read["backwards/3_letters"]["q:0.5"].mean_steps <= 3


def test_windows_end_with_the_last_label_and_grade_the_answer_alone():
    exam = Exam(TASK, 5, vocab_size=TASK.vocab_size, room=ROOM, multiple=4, strata=["2_letters"])
    (windows,) = exam.windows.values()
    assert windows.input.shape == (5, 4)
    assert ((windows.labels != IGNORE_INDEX).sum(dim=1) == 2).all()
    assert windows.positions.tolist() == [[0, 1, 2, 3]] * 5
    assert windows.columns["left"].tolist() == [[4, 3, 2, 1]] * 5


def test_a_question_is_also_graded_at_the_depth_it_needs():
    exam = Exam(TASK, 4, vocab_size=TASK.vocab_size, room=ROOM, strata=["2_letters"])
    (name,) = exam.windows
    right = np.array([[2.0, 1, 0, 2], [0, 2, 2, 1]])  # of two labels each
    steps = np.array([[2.0] * 4, [6.0] * 4])
    names = ["static:1", "static:3"]
    for needed, share, mean in (([1, 3, 3, 1], 1.0, 2.0), ([3, 1, 1, 3], 0.0, 2.0)):
        exam.steps[name] = needed
        found = exam.grade(names, lambda windows: (right, steps))[name]
        assert found["depth"].metrics["acc,none"] == share
        assert found["depth"].mean_steps == mean
    assert found["depth"].metrics["labels_acc,none"] == 0.25
    assert found["static:1"].metrics["acc,none"] == 0.5
    assert found["static:1"].metrics["labels_acc,none"] == 5 / 8
    assert (found["static:1"].mean_steps, found["static:3"].mean_steps) == (1, 3)
    exam.steps[name] = [1, 2, 3, 1]
    assert list(exam.grade(names, lambda windows: (right, steps))[name]) == names


def test_a_model_without_its_vocabulary_or_room_is_refused(caplog):
    with pytest.raises(UserError, match="backwards has 8 tokens, the model's vocabulary has 7"):
        Exam(TASK, 5, vocab_size=7, room=ROOM)
    with pytest.raises(UserError, match=r"backwards/3_letters.*6 positions does not fit.*5"):
        Exam(TASK, 5, vocab_size=8, room=5)
    fitting = {"vocab_size": TASK.vocab_size, "room": 4}
    exam = Exam(TASK, 5, **fitting, leave_out=True)
    assert list(exam.windows) == ["backwards/1_letters", "backwards/2_letters"]
    assert "not asked while training: backwards/3_letters" in caplog.text


@pytest.mark.usefixtures("alone")
def test_a_run_is_asked_while_training_from_its_checkpoint_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = toy_config(tmp_path / "run", steps=2)
    config.suite.interval = 2
    run_recipe(
        Recipe(name="one", stages=[Stage(name="one", config=config)]), folder=config.dump_folder
    )
    run = RunDirectory(config.dump_folder)
    (record,) = read_jsonl(run.evals_jsonl)
    # A limit may also ask for more than the usual number.
    monkeypatch.setattr("titan_loop.evaluation.evaluate_tasks._EXAM_QUESTIONS", 3)
    options = TaskOptions(tasks=(TASK.name,), depths=DEPTHS, limit=12)
    found = evaluate_tasks(run.path, options)
    assert found.failures == {}
    assert record["results"] == found.flat()
    assert main(["eval", str(run.path), "--tasks", TASK.name, "--frontier", "--limit", "8"]) == 0
    assert main(["report", str(run.path)]) == 0
    rows = (run.path / "report.html").read_text(encoding="utf-8")
    assert [rows.count(f"<td>backwards/{n}_letters</td>") for n in (1, 2, 3)] == [1, 1, 1]


def ask(run: Path, world: int, layout: dict[str, int]) -> dict[str, float]:
    config = toy_config(run)
    config.suite.interval = 1
    return ask_untrained(config, world, layout).flat()


@pytest.fixture(scope="module")
def one_rank(gloo_pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    (report,) = gloo_pool(1).run(ask, tmp_path_factory.mktemp("one") / "run", 1, {})
    assert any(0 < value < 1 for name, value in report.items() if "/acc" in name)
    return report


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", [{}, {"cp": 2}], ids=["fsdp", "cp"])
def test_two_ranks_grade_as_one(gloo_pool, tmp_path: Path, layout: dict, one_rank):
    for report in gloo_pool(2).run(ask, tmp_path / "run", 2, layout):
        assert report == one_rank
