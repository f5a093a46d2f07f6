"""Mano beside Capo: shares, a vocabulary of both, and a run on it from start to record."""

from itertools import islice
from pathlib import Path

import pytest

from tests.support.tiny import tiny_config
from tests.train_configs.physics.test_capo import SMALL, check_bits
from titan_loop.data.labels import IGNORED
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.data.tasks.mano import Mano
from titan_loop.data.tasks.recorded_task import recorded_task
from titan_loop.evaluation.evaluate_tasks import evaluate_tasks
from titan_loop.evaluation.task_options import TaskOptions
from titan_loop.evaluation.while_training import evaluations
from titan_loop.recipes.recorded import recorded_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_jsonl
from titan_loop.training.run import run_training
from train_configs.adaptive.task import ManoCapo

BOTH = ManoCapo(mano=Mano(modulus=5, max_operations=3), capo=SMALL, mano_share=0.25)


def test_an_oracle_and_a_uniform_model_know_the_bits_of_the_formula():
    check_bits(BOTH, BOTH.mano.vocab_size)


def test_mano_and_capo_are_mixed_by_their_share_without_a_common_token():
    drawn = list(islice(BOTH.questions(key=1), 4000))
    manos = [question for question in drawn if question.task == "mano"]
    # Binomial: a deviation of 27, five of them.
    assert len(manos) == pytest.approx(1000, abs=137)
    tokens = {name: set() for name in ("mano", "capo")}
    for question in drawn:
        example = BOTH.encode(question)
        used = {*example.tokens.tolist(), *(x for x in example.labels.tolist() if x != IGNORED)}
        tokens[question.task] |= used
    assert not tokens["mano"] & tokens["capo"]
    assert max(tokens["capo"]) < BOTH.vocab_size
    alone = BOTH.mano.encode(manos[0].of_task)
    assert (BOTH.encode(manos[0]).tokens == alone.tokens).all()
    exam = BOTH.exam(20)
    assert [*exam] == ["mano", "names", "values"]
    held_out = [
        BOTH.mano.is_held_out(q.of_task) for q in BOTH.held_out_questions(20, BOTH.strata["mano"])
    ]
    assert all(held_out)
    assert not any(BOTH.mano.is_held_out(question.of_task) for question in manos)


@pytest.mark.usefixtures("alone")
def test_a_run_on_both_is_asked_and_trained_again_from_what_it_recorded(tmp_path: Path):
    config = tiny_config(Path("none"), tmp_path / "run", steps=2)
    config.training.seq_len = BOTH.longest_example
    config.total_tokens = 2 * config.training.seq_len * config.training.local_batch_size
    config.batch.global_batch_tokens = type(config.batch.global_batch_tokens).constant(
        config.training.seq_len * config.training.local_batch_size
    )
    config.dataloader = TaskLoader.Config(task=BOTH)
    config.suite.interval, config.suite.tasks, config.suite.depths = 2, [BOTH.name], [1]
    config.suite.questions = 12
    run_training(config, evaluations=evaluations)
    run = RunDirectory(config.dump_folder)
    (record,) = read_jsonl(run.evals_jsonl)
    found = evaluate_tasks(run.path, TaskOptions(tasks=(BOTH.name,), depths=[1], limit=12))
    assert found.failures == {}
    assert found.flat() == pytest.approx(record["results"])
    knowledge = found.tasks["mano_capo/knowledge"]["static:1"].metrics
    assert knowledge["names_bits"] + knowledge["values_bits"] == pytest.approx(knowledge["bits"])
    loader = config.dataloader.build(dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=1)
    assert recorded_task(loader.state_dict()) == BOTH
    (stage,) = recorded_recipe(run.path / "config.json").stages
    assert stage.config.dataloader.generated_task() == BOTH
