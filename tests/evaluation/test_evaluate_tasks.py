"""Tasks on one checkpoint: offline suites, failures that cost nothing else, and merged reports."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from titan_loop.analysis.evaluation_tables import task_table
from titan_loop.analysis.frontier import write_frontier
from titan_loop.errors import UserError
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.harness_tasks import (
    HarnessTasks,
    hub_offline_if_unreachable,
)
from titan_loop.evaluation.offline_tasks import (
    mano_documents,
    multi_hop_documents,
    offline_config,
)
from titan_loop.evaluation.suites import SuiteTask, expand_tasks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.task_report import ReadingResult, TaskReport
from titan_loop.plugins import find
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json


def test_generated_questions_never_change():
    """Or scores of two versions could not be compared."""
    mano, hops = mano_documents(), multi_hop_documents()
    assert len(mano) == len(hops) == 200
    digests = [hashlib.sha256(json.dumps(part).encode()).hexdigest() for part in (mano, hops)]
    assert digests == [
        "342280308f1102d6f1a61f622210d9fa6607b1bed77f9449b330e7fd47073a4d",
        "bd7e6fe4264e29aab7b680c260398076f003408042f2e1a0b4583e48c3683009",
    ]
    head, *shown, asked = mano[0]["text"].splitlines()
    assert "modulo 23" in head
    assert [line.split(" = ")[0].split()[0] for line in shown] == 4 * ["len_3"]
    assert asked.endswith(" =")
    assert mano[0]["choices"] == [str(value) for value in range(23)]
    # Two facts of the chain and four of others; three people of the chain and two a distractor.
    assert (hops[0]["text"].count("\n"), len(hops[0]["choices"])) == (6 + 1, 3 + 2 * 4)
    config = offline_config("mano")
    assert config["num_fewshot"] == 0
    assert config["metadata"] == {"version": 1}
    assert all(metric["higher_is_better"] for metric in config["metric_list"])


def test_offline_tasks_run_and_a_failing_one_loses_nothing(own_run: Path, caplog):
    tasks = ("mano", "mmlu_dev,no_such_task", "multi_hop")
    options = TaskOptions(tasks=tasks, depths=(1, 4), limit=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HarnessTasks, "find", _nobody_knows)
        report = evaluate_tasks(own_run, options)
    assert list(report.tasks) == ["mano", "mmlu_dev", "multi_hop"]
    assert "limit=4 num_fewshot=0" in report.tasks["mano"]["static:1"].settings
    for readings in report.tasks.values():
        assert list(readings) == ["static:1", "static:4"]
        for reading, result in readings.items():
            assert 0 <= result.metrics["acc,none"] <= 1
            assert result.metrics["answer_bits_per_byte"] > 0
            assert result.mean_steps == float(reading.removeprefix("static:"))
    assert "'no_such_task' is unknown" in report.failures["no_such_task"]
    run = RunDirectory(own_run)
    assert TaskReport.load(report.path(run)) == report
    assert "FAILED no_such_task" in task_table(report, {"mano": "acc,none"})

    more = TaskOptions(tasks=("mano",), exit="q:0.5", limit=4)
    evaluate_tasks(own_run, more)
    (merged,) = TaskReport.all_of(run)
    assert list(merged.tasks["mano"]) == ["static:1", "static:4", "q:0.5"]
    assert merged.tasks["multi_hop"] == report.tasks["multi_hop"]
    assert "no_such_task" in merged.failures
    assert merged.flat()["mano/acc,none/static:4"] == report.flat()["mano/acc,none/static:4"]

    # More questions replace an answer, fewer do not; the other readings keep theirs.
    for limit in (5, 3):
        both = ("mano", "multi_hop")
        evaluate_tasks(own_run, TaskOptions(tasks=both, exit="q:0.5", limit=limit))
    (merged,) = TaskReport.all_of(run)
    limits = {name: result.settings.split()[1] for name, result in merged.tasks["mano"].items()}
    assert limits == {"static:1": "limit=4", "static:4": "limit=4", "q:0.5": "limit=5"}
    assert "the older result, whose sample is larger (windows=64 limit=5" in caplog.text
    assert caplog.text.count("keeps the older result") == 2  # once a task


def test_a_smaller_sample_of_text_is_not_kept_and_a_task_that_works_failed_no_more(
    tmp_path: Path, caplog
):
    def asked(settings: str, *, text: str = "held_out/code", **failures: str) -> TaskReport:
        result = ReadingResult(metrics={"bits_per_byte": len(settings)}, settings=settings)
        return TaskReport(
            step=1,
            tokens=1,
            trained_recurrent_steps=1,
            manifest_sha256="",
            tasks={text: {"static:1": result}} if text else {},
            failures=failures,
        )

    run = RunDirectory(tmp_path)
    asked("", text="", held_out="no text", mano="gone").save(run)
    asked("windows=64 limit=None").save(run)
    for settings, kept in (
        ("windows=4 limit=8", "windows=64 limit=None"),
        ("windows=64 limit=8", "windows=64 limit=None"),
        ("windows=128 limit=None dtype=bfloat16", "windows=128 limit=None dtype=bfloat16"),
    ):
        path = asked(settings).save(run)
        report = TaskReport.load(path)
        assert report.tasks["held_out/code"]["static:1"].settings == kept
    assert report.failures == {"mano": "gone"}
    # As 0.1.0 wrote them.
    record = json.loads(path.read_text())
    del record["tasks"]["held_out/code"]["static:1"]["settings"]
    path.write_text(json.dumps({**record, "settings": {"held_out/code": "windows=9"}}))
    assert TaskReport.load(path).tasks["held_out/code"]["static:1"].settings == "windows=9"


def test_a_suite_passes_over_what_a_run_cannot_be_asked(
    own_run: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """As an imported run it has no held-out text, and nobody consented to run code."""
    from titan_loop.cli import main

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
    assert main.main(["eval", str(own_run), "--tasks", "humaneval"]) == 1
    assert "--confirm-run-unsafe-code" in capsys.readouterr().out


def test_python_that_task_files_name_runs_only_with_consent(own_run: Path, tmp_path: Path):
    """Also where a file includes another from elsewhere."""
    tasks, marker = tmp_path / "tasks", tmp_path / "ran"
    (tmp_path / "hidden").mkdir()
    tasks.mkdir()
    (tmp_path / "hidden" / "code.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\ndef text(doc): return ''\n"
    )
    (tmp_path / "hidden" / "base.yaml").write_text("doc_to_text: !function code.text\n")
    (tmp_path / "data.jsonl").write_text('{"a": "b"}\n')
    (tasks / "toy.yaml").write_text(
        "task: toy\ninclude: ../hidden/base.yaml\ndataset_path: json\ndataset_kwargs:\n"
        f"  data_files: {tmp_path / 'data.jsonl'}\n  cache_dir: {tmp_path / 'cache'}\n"
        "test_split: train\noutput_type: loglikelihood\ndoc_to_target: 'b'\n"
        "metric_list:\n  - metric: perplexity\n"
    )
    options = TaskOptions(tasks=("toy",), include_path=tasks)
    report = evaluate_tasks(own_run, options)
    assert not marker.exists()
    assert "!function code.text" in {**report.skipped, **report.failures}["toy"]
    HarnessTasks(tasks, confirm_run_unsafe_code=True).load(SuiteTask("toy"))
    assert marker.exists(), "the harness should have run it, or this test shows nothing"


@pytest.mark.parametrize(
    ("file", "content"), [("toy.yaml", "task: toy\noutput_tipe: x\n"), ("items.jsonl", "{")]
)
def test_an_own_task_that_cannot_be_used_is_one_line(tmp_path: Path, file: str, content: str):
    (tmp_path / "items.jsonl").write_text('{"a": "b"}\n')
    (tmp_path / "toy.yaml").write_text(
        f"task: toy\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path}/items.jsonl\n"
        f"  cache_dir: {tmp_path / 'cache'}\ntest_split: train\noutput_type: loglikelihood\n"
    )
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=f"^toy: its task file, or the data .*check {tmp_path}"):
        HarnessTasks(tmp_path).load(SuiteTask("toy"))


def _nobody_knows(self: HarnessTasks, name: str):
    raise UserError(f"task {name!r} is unknown")


def test_tasks_that_need_the_network_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "tasks"
    (home / "far").mkdir(parents=True)
    (home / "far" / "far.yaml").write_text(
        "task: far_away\ndataset_path: nobody/nothing-of-this-name\ntest_split: test\n"
        "output_type: loglikelihood\ndoc_to_text: ''\ndoc_to_target: ''\n"
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="Hugging Face hub, which cannot be reached") as raised:
        HarnessTasks(home=home).load(SuiteTask("far_away"))
    assert "\n" not in str(raised.value)
    with (
        pytest.raises(UserError, match="far_away names a file that does not exist"),  # no hub's
        hub_offline_if_unreachable("far_away"),
    ):
        (tmp_path / "missing.json").read_text()
    with pytest.raises(UserError, match="'far_awya' is unknown; nearest: far_away"):
        HarnessTasks(home=home).load(SuiteTask("far_awya"))


def test_the_papers_tasks_have_their_shots_and_exist_in_the_harness():
    shots = {task.name: task.num_fewshot for task in find("suites", "ouro_base")}
    assert shots == {
        "mmlu": 5, "mmlu_pro": 5, "bbh_cot_fewshot": 3, "arc_challenge": 25, "hellaswag": 10,
        "winogrande": 5, "gsm8k_cot": 3, "minerva_math500": None, "humaneval": 0,
        "humaneval_plus": 0, "mbpp": 3, "mbpp_plus": 3,
    }  # fmt: skip
    depth = {task.name: task.num_fewshot for task in find("suites", "depth")}
    assert depth == {
        "arc_challenge": 25, "arc_easy": 8, "commonsense_qa": 10, "hellaswag": 10, "mmlu": 5,
        "winogrande": 5,
    }  # fmt: skip
    scaling = {task.name: task.num_fewshot for task in find("suites", "scaling")}
    assert scaling == dict.fromkeys(
        ("arc_challenge", "arc_easy", "hellaswag", "lambada_openai", "openbookqa", "piqa"), 0
    )
    tasks = HarnessTasks()
    for name in {**shots, **depth, **scaling}:
        assert name in tasks.find(name).all_tasks


def test_examples_are_those_asked_for_unless_a_task_has_none(tmp_path: Path):
    (tmp_path / "items.jsonl").write_text('{"a": "b"}\n' * 6)
    for name, own in (("open", ""), ("two", "num_fewshot: 2\n"), ("none", "num_fewshot: 0\n")):
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path}/"
            f"items.jsonl\n  cache_dir: {tmp_path / 'cache'}\ntest_split: train\n{own}"
            "output_type: loglikelihood\ndoc_to_text: ''\ndoc_to_target: b\n"
        )
    tasks = HarnessTasks(tmp_path)

    def shots(name: str, asked: int | None) -> int:
        (loaded,) = tasks.load(SuiteTask(name, num_fewshot=asked))["tasks"].values()
        return loaded.get_config("num_fewshot")

    assert [shots("open", asked) for asked in (None, 0, 5)] == [0, 0, 5]
    assert [shots("two", asked) for asked in (None, 0, 5)] == [2, 0, 5]
    assert [shots("none", asked) for asked in (None, 5)] == [0, 0]


def test_numbers_as_answers_are_found_as_the_harness_finds_them(own_run: Path, tmp_path: Path):
    """A number in a field is the text of a choice, and a number from a template its index."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"q": "a", "s": "{n}", "i": {n - 1}}}\n' for n in range(1, 6)))
    for name, target in (("text", "s"), ("index", "i"), ("template", "'{{i}}'")):
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {data}\n"
            f"  cache_dir: {tmp_path / 'cache'}\ntest_split: train\n"
            "output_type: multiple_choice\ndoc_to_text: '{{q}}'\n"
            f"doc_to_choice: ['1', '2', '3', '4', '5']\ndoc_to_target: {target}\n"
            "num_fewshot: 0\nmetric_list:\n  - metric: acc\n"
        )
    (tmp_path / "lost.yaml").write_text(
        "task: lost\ndataset_path: json\ndataset_kwargs:\n  data_files: /no/such.jsonl\n"
        "test_split: train\n"
    )
    tasks = ("text", "index", "template", "lost")
    report = evaluate_tasks(own_run, TaskOptions(tasks=tasks, include_path=tmp_path, num_fewshot=2))
    results = [next(iter(report.tasks[name].values())) for name in tasks[:3]]
    assert results[0].metrics == results[1].metrics == results[2].metrics
    assert results[0].metrics["answer_bits_per_byte"] > 0
    assert "num_fewshot=0 " in results[0].settings  # the file forbids examples
    chat = TaskOptions(
        tasks=tasks[:1], include_path=tmp_path, apply_chat_template=True, system_instruction="S"
    )
    asked = next(iter(evaluate_tasks(own_run, chat).tasks["text"].values()))
    assert asked.settings.startswith("chat system=8de0b3c4 ")
    assert asked.metrics != results[0].metrics
    assert (
        "names a file that does not exist (Unable to find '/no/such.jsonl')"
        in (report.failures["lost"])
    )


def test_names_and_options_are_checked_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(UserError, match="no task was named"):
        expand_tasks([])
    with pytest.raises(UserError, match="num_fewshot=-1"):
        expand_tasks(["mano"], -1)
    assert len(expand_tasks(["depth", "mmlu"])) == len(find("suites", "depth"))
    for options, message in (
        ({"depths": (0,)}, "at least 1"),
        ({"exit": "q:2"}, "between 0 and 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"kv_cache": "lats"}, "kv_cache=lats is unknown; nearest: last"),
        ({"tokenizer": str(tmp_path / "none.json")}, "is not a file"),
        ({"depths": (1,), "frontier": True}, "exclude each other"),
        ({"system_instruction": "S"}, "system_instruction has no effect without apply_chat"),
        ({"frontier": True, "exit": "q:0.5"}, "exit=q:0.5 has no effect with depths or frontier"),
        ({"depths": (1,), "recurrent_steps": 4}, "recurrent_steps=4 has no effect with depths"),
        ({"include_path": tmp_path / "none"}, "is not a folder"),
    ):
        frontier = options.pop("frontier", False)
        with pytest.raises(UserError, match=message):
            evaluate_tasks(tmp_path, TaskOptions(tasks=("mano",), **options), frontier=frontier)


def test_held_out_text_and_its_frontier(text_run: Path):
    options = TaskOptions(tasks=("held_out",), windows=4)
    report = evaluate_tasks(text_run, options, frontier=True)
    ((task, readings),) = report.tasks.items()
    assert task == "held_out/source"
    bits = {name: result.metrics["bits_per_byte"] for name, result in readings.items()}
    assert bits["q:0"] == bits["static:1"]
    assert bits["q:1"] == bits["hidden:0"] == bits["kl:0,0"] == bits["static:4"]
    assert bits["hidden:inf"] == bits["kl:inf,inf"] == bits["static:2"]
    run = RunDirectory(text_run)
    written = write_frontier(report, run)
    assert written is not None
    assert written.png.read_bytes().startswith(b"\x89PNG")
    lines = written.csv.read_text().splitlines()
    assert lines[0] == "task,metric,policy,reading,mean_steps,value,low,high,seconds"
    assert all(float(line.split(",")[-1]) > 0 for line in lines[1:])  # each was timed
    assert len(lines) == 1 + len(readings)

    from titan_loop.evaluation.evaluate_run import evaluate_run

    # The older evaluation scores the same windows in another way.
    depths = evaluate_run(run.path, depths=[1, 4], windows=4).sources["source"].depths
    assert depths[4].value == pytest.approx(bits["static:4"], rel=1e-5)


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
    assert readings(2, str(source)) == {"static:1", "static:2", "static:4"}
    assert readings(4, str(other)) == {"static:4"}
