"""Tasks on one checkpoint: text, suites, the user's own; a failing one costs no other."""

import hashlib
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from tests.evaluation.task_run import write_task_run
from tests.families.ouro.hugging_face.conftest import convert
from tests.support.tiny import SEQ_LEN
from titan_loop.analysis.evaluation_tables import task_table
from titan_loop.analysis.frontier import write_frontier
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.harness_tasks import HarnessTasks
from titan_loop.evaluation.offline_tasks import mano_documents, multi_hop_documents
from titan_loop.evaluation.suites import SuiteTask, expand_tasks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.task_report import TaskReport
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.plugins import find
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json


def test_generated_questions_never_change():
    """Or scores of two versions could not be compared."""
    digests = [
        hashlib.sha256(json.dumps(part).encode()).hexdigest()
        for part in (mano_documents(), multi_hop_documents())
    ]
    assert digests == [
        "342280308f1102d6f1a61f622210d9fa6607b1bed77f9449b330e7fd47073a4d",
        "bd7e6fe4264e29aab7b680c260398076f003408042f2e1a0b4583e48c3683009",
    ]


def test_offline_tasks_run_and_a_failing_one_loses_nothing(
    own_run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def nobody_knows(self: HarnessTasks, name: str) -> None:
        raise UserError(f"task {name!r} is unknown")

    monkeypatch.setattr(HarnessTasks, "find", nobody_knows)
    tasks = ("mano", "mmlu_dev,no_such_task", "multi_hop")
    report = evaluate_tasks(own_run, TaskOptions(tasks=tasks, depths=(1, 4), limit=4))
    assert list(report.tasks) == ["mano", "mmlu_dev", "multi_hop"]
    assert "limit=4 num_fewshot=0" in report.tasks["mano"]["static:1"].settings
    for readings in report.tasks.values():
        assert list(readings) == ["static:1", "static:4"]
        for reading, result in readings.items():
            assert 0 <= result.metrics["acc,none"] <= 1
            assert result.metrics["answer_bits_per_byte"] > 0
            assert result.mean_steps == float(reading.removeprefix("static:"))
    run = RunDirectory(own_run)
    assert TaskReport.load(report.path(run)) == report
    assert "FAILED no_such_task" in task_table(report, {"mano": "acc,none"})

    # More questions replace an answer, fewer do not; the other readings keep theirs.
    for limit in (5, 3):
        options = TaskOptions(tasks=("mano",), exit="q:0.5", limit=limit)
        evaluate_tasks(own_run, options)
    (merged,) = TaskReport.all_of(run)
    limits = {name: result.settings.split()[1] for name, result in merged.tasks["mano"].items()}
    assert limits == {"static:1": "limit=4", "static:4": "limit=4", "q:0.5": "limit=5"}
    assert "the older result, whose sample is larger (windows=None limit=5" in caplog.text
    assert merged.tasks["multi_hop"] == report.tasks["multi_hop"]
    assert "no_such_task" in merged.failures


def test_a_suite_passes_over_what_a_run_cannot_be_asked(
    own_run: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """As an imported run it has no held-out text, and nobody consented to run code."""
    for names, optional in ((["offline"], True), (["offline", "held_out"], False)):
        (held_out, *_) = [task for task in expand_tasks(names) if task.name == "held_out"]
        assert held_out.optional is optional
    (code,) = [task for task in expand_tasks(["ouro_base"]) if task.name == "mbpp_plus"]
    (held_out,) = [task for task in expand_tasks(["offline"]) if task.name == "held_out"]
    config = RunDirectory(own_run).read_config()
    write_json(RunDirectory(own_run).config_json, {**config, "dataloader": {}})
    monkeypatch.setattr("titan_loop.evaluation.suites.OFFLINE", (code, held_out))
    report = evaluate_tasks(own_run, TaskOptions(tasks=("offline",)))
    assert report.failures == {}
    assert "--confirm-run-unsafe-code" in report.skipped["mbpp_plus"]
    assert "it has no held-out text" in report.skipped["held_out"]
    assert "skipped held_out: " in task_table(report, {})
    # Named itself, a task without a result is a failure.
    assert main(["eval", str(own_run), "--tasks", "humaneval"]) == 1
    assert "--confirm-run-unsafe-code" in capsys.readouterr().out


def write_task(folder: Path, name: str, lines: str, data: str = '{"a": "b"}\n' * 6) -> None:
    """A task file of the user's, on a JSONL file beside it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text(data)
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {folder}/{name}.jsonl\n"
        f"  cache_dir: {folder / 'cache'}\ntest_split: train\n{lines}"
    )


def test_python_that_task_files_name_runs_only_with_consent(own_run: Path, tmp_path: Path):
    """Also where a file includes another from elsewhere."""
    marker, hidden = tmp_path / "ran", tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "code.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\ndef text(doc): return ''\n"
    )
    (hidden / "base.yaml").write_text("doc_to_text: !function code.text\n")
    lines = "include: ../hidden/base.yaml\noutput_type: loglikelihood\ndoc_to_target: 'b'\n"
    write_task(tmp_path / "tasks", "toy", lines + "metric_list:\n  - metric: perplexity\n")
    options = TaskOptions(tasks=("toy",), include_path=tmp_path / "tasks")
    report = evaluate_tasks(own_run, options)
    assert not marker.exists()
    assert "!function code.text" in report.failures["toy"]
    HarnessTasks(tmp_path / "tasks", confirm_run_unsafe_code=True).load(SuiteTask("toy"))
    assert marker.exists(), "the harness should have run it, or this test shows nothing"


def test_a_group_without_a_mean_has_its_members(own_run: Path, tmp_path: Path):
    """Each with its own mean steps; and more documents replace fewer."""
    choice = "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: ['1', 'bb']\n"
    choice += "doc_to_target: 1\nmetric_list:\n  - metric: acc\n"
    for name, text in (("a", "1+1="), ("b", "xyz")):
        write_task(tmp_path, name, choice, f'{{"q": "{text}"}}\n' * 3)
    (tmp_path / "own.yaml").write_text("group: own\ntask: [a, b]\n")
    own = {"include_path": tmp_path, "exit": "confidence:0.03"}
    asked = {}
    for tasks, limit in (("a,b", 1), ("own", None)):
        options = TaskOptions(tasks=(tasks,), limit=limit, **own)
        asked[tasks] = evaluate_tasks(own_run, options).tasks
    assert asked["a,b"].keys() == asked["own"].keys() == {"a", "b"}
    steps = [[each.mean_steps for each in asked[t][n].values()] for n in "ab" for t in asked]
    assert steps[0] == steps[1] != steps[2] == steps[3]
    (result,) = asked["own"]["a"].values()
    assert "windows=None limit=None" in result.settings


@pytest.mark.parametrize(("lines", "data"), [("output_tipe: x\n", '{"a": "b"}\n'), ("", "{")])
def test_an_own_task_that_cannot_be_used_is_one_line(tmp_path: Path, lines: str, data: str):
    write_task(tmp_path, "toy", lines, data)
    with pytest.raises(UserError, match=f"^toy: its task file, or the data .*check {tmp_path}"):
        HarnessTasks(tmp_path).load(SuiteTask("toy"))


def test_tasks_that_need_the_network_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "tasks"
    (home / "far").mkdir(parents=True)
    (home / "far" / "far.yaml").write_text(
        "task: far_away\ndataset_path: nobody/nothing-of-this-name\ntest_split: test\n"
        "output_type: loglikelihood\ndoc_to_text: ''\ndoc_to_target: ''\n"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="Hugging Face hub, which cannot be reached") as raised:
        HarnessTasks(home=home).load(SuiteTask("far_away"))
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="'far_awya' is unknown; nearest: far_away"):
        HarnessTasks(home=home).load(SuiteTask("far_awya"))


def test_the_papers_tasks_exist_in_the_harness():
    suites = [find("suites", name) for name in ("ouro_base", "depth", "scaling")]
    missing = {task.name for suite in suites for task in suite}
    starts = {re.split("[^a-z]", name)[0] for name in missing}
    # Its own index takes ten seconds, and to read all files two.
    files = (Path(find_spec("lm_eval").origin).parent / "tasks").rglob("*.yaml")
    for path in sorted(files, key=lambda path: not path.parent.name.startswith((*starts,))):
        missing -= {*re.findall(r"^(?:group|tag|task): *(\S+)", path.read_text("utf-8"), re.M)}
        if not missing:
            return
    pytest.fail(f"not in the harness: {missing}")


def test_examples_are_those_asked_for_unless_a_task_has_none(tmp_path: Path, caplog):
    loglikelihood = "output_type: loglikelihood\ndoc_to_text: ''\ndoc_to_target: b\n"
    for name, own in (("open", ""), ("two", "num_fewshot: 2\n"), ("none", "num_fewshot: 0\n")):
        write_task(tmp_path, name, own + loglikelihood)
    tasks = HarnessTasks(tmp_path)

    def shots(name: str, asked: int | None) -> int:
        (loaded,) = tasks.load(SuiteTask(name, num_fewshot=asked))["tasks"].values()
        return loaded.get_config("num_fewshot")

    assert [shots("open", asked) for asked in (None, 0, 5)] == [0, 0, 5]
    assert [shots("two", asked) for asked in (None, 0, 5)] == [2, 0, 5]
    assert "not shown" not in caplog.text
    assert [shots("none", asked) for asked in (None, 5)] == [0, 0]
    assert "none: its file has num_fewshot=0, so 5 examples are not shown" in caplog.text


def test_numbers_as_answers_are_found_as_the_harness_finds_them(own_run: Path, tmp_path: Path):
    """A number in a field is the text of a choice, and a number from a template its index."""
    data = "".join(f'{{"q": "a", "s": "{n}", "i": {n - 1}}}\n' for n in range(1, 6))
    choice = "output_type: multiple_choice\ndoc_to_text: '{{q}}'\nnum_fewshot: 0\n"
    choice += "doc_to_choice: ['1', '2', '3', '4', '5']\nmetric_list:\n  - metric: acc\n"
    for name, target in (("text", "s"), ("index", "i"), ("template", "'{{i}}'")):
        write_task(tmp_path, name, f"{choice}doc_to_target: {target}\n", data)
    write_task(tmp_path, "lost", choice)
    (tmp_path / "lost.jsonl").unlink()
    tasks = ("text", "index", "template", "lost")
    report = evaluate_tasks(own_run, TaskOptions(tasks=tasks, include_path=tmp_path, num_fewshot=2))
    results = [next(iter(report.tasks[name].values())) for name in tasks[:3]]
    assert results[0].metrics == results[1].metrics == results[2].metrics
    assert results[0].metrics["answer_bits_per_byte"] > 0
    assert "num_fewshot=0 " in results[0].settings  # the file forbids examples
    assert "names a file that does not exist (Unable to find" in report.failures["lost"]
    chat = TaskOptions(
        tasks=tasks[:1], include_path=tmp_path, apply_chat_template=True, system_instruction="S"
    )
    asked = next(iter(evaluate_tasks(own_run, chat).tasks["text"].values()))
    assert asked.settings.startswith("chat system=8de0b3c4 ")
    assert asked.metrics != results[0].metrics


def test_names_and_options_are_checked_before_anything_is_loaded(tmp_path: Path):
    assert len(expand_tasks(["depth", "mmlu"])) == len(find("suites", "depth"))
    for options, message in (
        ({"tasks": (",",)}, "no task was named; give tasks or suites: "),
        ({"num_fewshot": -1}, "num_fewshot=-1 must be at least 0"),
        ({"depths": (0,)}, "at least 1"),
        ({"exit": "q:2"}, "between 0 and 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"kv_cache": "lats"}, "kv_cache=lats is unknown; nearest: last"),
        ({"tokenizer": str(tmp_path / "none.json")}, "is not a file"),
        ({"depths": (1,), "frontier": True}, "exclude each other"),
        ({"system_instruction": "S"}, "have no effect without apply_chat"),
        ({"frontier": True, "exit": "q:0.5"}, "exit=q:0.5 has no effect with depths or frontier"),
        ({"depths": (1,), "recurrent_steps": 4}, "recurrent_steps=4 has no effect with depths"),
        ({"include_path": tmp_path / "none"}, "is not a folder"),
    ):
        frontier = options.pop("frontier", False)
        given = TaskOptions(**{"tasks": ("mano",), **options})
        with pytest.raises(UserError, match=message):
            evaluate_tasks(tmp_path, given, frontier=frontier)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("hops",), "kv_cache": "last"}, "kv_cache=last has no effect on hops, the run"),
        ({"tasks": ("hops",), "prefill_steps": 1}, "prefill_steps=1 has no effect on hops"),
        ({"tasks": ("copa",), "prefill_steps": 9}, "prefill_steps=9 is above the 3 recurrent"),
        ({"tasks": ("copa",), "prefill_steps": 3, "depths": (2, 4)}, "is above the 2 recurrent"),
    ],
)
def test_options_that_do_not_fit_the_run_are_told_before_the_first_task(
    tmp_path: Path, options: dict, message: str
):
    run = write_task_run(tmp_path / "run", OuroOptions())
    with pytest.raises(UserError, match=message):
        evaluate_tasks(run, TaskOptions(**options))


def test_held_out_text_and_its_frontier(text_run: Path):
    options = TaskOptions(tasks=("held_out",), windows=4)
    report = evaluate_tasks(text_run, options, frontier=True)
    ((task, readings),) = report.tasks.items()
    assert task == "held_out/source"
    bits = {name: result.metrics["bits_per_byte"] for name, result in readings.items()}
    assert bits["q:0"] == bits["static:1"]
    assert bits["q:1"] == bits["hidden:0"] == bits["kl:0,0"] == bits["static:4"]
    assert bits["hidden:inf"] == bits["kl:inf,inf"] == bits["static:2"]
    written = write_frontier(report, RunDirectory(text_run))
    assert written is not None
    assert written.read_bytes().startswith(b"\x89PNG")
    # Static depths alone are read through the streamed head.
    depths = TaskOptions(tasks=("held_out",), depths=(1, 4), windows=4)
    (streamed,) = evaluate_tasks(text_run, depths).tasks.values()
    assert streamed["static:4"].metrics["bits_per_byte"] == pytest.approx(
        bits["static:4"], rel=1e-5
    )


def test_sources_and_window_are_chosen(source: Path, little_held_out: Path, tmp_path: Path, caplog):
    run = write_run_of(source, tmp_path / "run", little_held_out)
    write_checkpoint_of(run, 3)
    assert [*evaluate_tasks(run, TaskOptions(depths=(1,), windows=2)).tasks] == ["held_out/source"]
    assert f"not scored: source {little_held_out} has" in caplog.text
    with pytest.raises(
        UserError, match=r"little has .* tokens in 'held_out', less than one window"
    ):
        evaluate_tasks(run, TaskOptions(sources=("little",)))

    def scored(*sources: str, seq_len: int = 8) -> dict[str, float]:
        options = TaskOptions(depths=(1,), windows=2, seq_len=seq_len, sources=sources)
        found = evaluate_tasks(run, options).tasks
        return {name: each["static:1"].metrics["bits_per_byte"] for name, each in found.items()}

    together = scored()
    assert [*together] == ["held_out/source", "held_out/little", "held_out/all"]
    assert scored("little") == {"held_out/little": together["held_out/little"]}
    longer = 3 * SEQ_LEN  # than the rotary table of training
    assert scored(str(source), seq_len=longer)["held_out/source"] > 1
    other = shutil.copytree(source, tmp_path / "other")
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"other/tokenizer\.json"):
        scored(str(other))


def test_an_imported_model_is_scored_on_sources_that_are_named(
    source: Path, tmp_path: Path, capsys
):
    run = write_run_of(source, tmp_path / "run")
    write_checkpoint_of(run, 3)
    convert("export", run, "--output", tmp_path / "exported")
    convert("import", tmp_path / "exported", "--output", tmp_path / "imported")
    capsys.readouterr()
    words = ["eval", str(tmp_path / "imported"), "--depths", "1", "4", "--windows", "2"]
    assert main([*words, "--sources", str(source)]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "R = 4 (trained)" in printed
    assert "gram" not in printed  # it has read nothing that an n-gram model could count
    (report,) = TaskReport.all_of(RunDirectory(tmp_path / "imported"))
    before = evaluate_tasks(run, TaskOptions(depths=(1, 4), windows=2)).flat()
    assert report.flat() == before
    assert main([*words, "--sources", str(source), "--beats-unigram", "0.1"]) == EXIT_USER_ERROR
    assert "--beats-unigram needs a run that has read prepared sources" in capsys.readouterr().err
    assert main(words) == EXIT_USER_ERROR


def test_other_text_of_the_same_name_does_not_join_a_sweep(source: Path, tmp_path: Path):
    run = write_run_of(source, tmp_path / "run")
    write_checkpoint_of(run, 3)
    other = shutil.copytree(source, tmp_path / "elsewhere" / source.name)

    def readings(depth: int, *sources: str) -> set[str]:
        options = TaskOptions(tasks=("held_out",), windows=2, depths=(depth,), sources=sources)
        evaluate_tasks(run, options)
        (saved,) = TaskReport.all_of(RunDirectory(run))
        return {*saved.tasks[f"held_out/{source.name}"]}

    assert readings(1) == {"static:1"}
    assert readings(4, source.name) == {"static:1", "static:4"}  # the same text
    assert readings(4, str(other)) == {"static:4"}
