"""Distilled prefill: the student's loss, its use in the engine, and a run that trains it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contracts.test_families import RELATIVE_TOLERANCE
from tests.families.xllm.contract import drawn_run
from tests.support.tiny import act_as_launched, train_run
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.data.labels import IGNORED
from titan_loop.families.xllm.decoder import XllmDecoder
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.families.xllm.student import start_from_teacher
from titan_loop.families.xllm.student_loss import StudentLoss, TeacherStart
from titan_loop.inference.engine import Engine
from titan_loop.inference.rows import Request
from titan_loop.models.family import build_decoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.training.depth_schedule import RecurrenceConfig
from titan_loop.training.schedule import Schedule

STEPS = 3


def make(**options: Any) -> XllmDecoder:
    torch.manual_seed(3)
    chosen = {"start_state": "zero", "student": 2, "recurrent_steps": STEPS, **options}
    model = build_decoder(XllmOptions(**chosen), max_seq_len=32).double()
    assert isinstance(model, XllmDecoder)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return model


def tokens() -> Tensor:
    return torch.randint(128, (3, 12), generator=torch.Generator().manual_seed(1))


def states(model: XllmDecoder) -> tuple[Tensor, Tensor]:
    """Return e and h, by the engine's hooks, without the code of the student's loss."""
    context = model.make_context(tokens())
    prelude = model.start(tokens(), context).embedding_BLD
    carry = model.start(tokens(), context)
    for step in range(1, STEPS + 1):
        hidden = model.step(carry, step, context)
        carry = model.advance(carry, hidden, step, context)
    return prelude, hidden


def test_the_loss_is_the_equation_and_only_the_student_learns():
    model = make()
    loss_fn = StudentLoss.Config().build()
    loss_fn.set_lm_head(model.lm_head)
    labels = tokens().roll(-1, 1)
    labels[1, 5:] = IGNORED
    loss, metrics = loss_fn(model(tokens(), collect="last"), labels, torch.tensor(29.0))
    loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in model.named_parameters() if n.startswith("student.")}

    whole = copy.deepcopy(model).requires_grad_(True)
    with torch.no_grad():
        prelude, target = states(whole)
        taught = whole.readout(whole.read(target, whole.make_context(tokens()))).log_softmax(-1)
    assert whole.student is not None
    context = whole.make_context(tokens())
    predicted = whole.student(prelude, context)
    answers = whole.readout(whole.read(predicted, context)).log_softmax(-1)
    want = torch.zeros((), dtype=torch.float64)
    for row, place in (labels != IGNORED).nonzero().tolist():
        energy = target[row].square().mean()
        want += (predicted[row, place] - target[row, place]).square().mean() / energy
        kl = F.kl_div(answers[row, place], taught[row, place], reduction="sum", log_target=True)
        want += kl
    want = want / 29
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)  # the error is in fp32
    assert metrics["student/error"] + metrics["student/kl"] == pytest.approx(loss.item())
    assert model.student is not None
    for name, parameter in model.student.named_parameters():
        own = whole.student.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, own, rtol=1e-5, atol=1e-7)


def test_a_student_made_of_the_teacher_is_one_recurrence_from_zeros():
    model = make().eval()
    assert model.student is not None
    assert model.injection is not None
    start_from_teacher(model.student, model.looped_layers(), model.injection)
    context = model.make_context(tokens())
    carry = model.start(tokens(), context)
    torch.testing.assert_close(
        model.student(carry.embedding_BLD, context), model.step(carry, 1, context)
    )


@pytest.mark.parametrize("kv_cache", ["full", "last"])
def test_prompts_of_fewer_steps_start_from_the_student(kv_cache: str):
    model = make().eval()
    prompt = tokens()[0].tolist()
    shortened = Engine(model, kv_cache=kv_cache, prefill_steps=1)
    whole = Engine(model, kv_cache=kv_cache)
    without = make(student=0)
    without.load_state_dict(
        {name: value for name, value in model.state_dict().items() if "student." not in name}
    )
    request = [Request(prompt=prompt, max_new_tokens=6)]
    usual = Engine(without.eval(), kv_cache=kv_cache)
    assert whole.complete(request)[0].tokens == usual.complete(request)[0].tokens

    # A perfect student: the state that it predicts is h_{R−1}, so one recurrence ends at h_R.
    class Perfect(torch.nn.Module):
        layers = ()

        def forward(self, prelude: Tensor, context: Any) -> Tensor:
            plain = model.make_context(prelude[..., 0])
            carry = model._started(prelude, plain)
            for step in range(1, STEPS):
                hidden = model.step(carry, step, plain)
                carry = model.advance(carry, hidden, step, plain)
            return carry.hidden_BLD

    first = shortened.complete(request)[0].tokens
    model.student = Perfect()  # type: ignore[assignment]
    perfect = shortened.complete(request)[0].tokens
    if kv_cache == "last":
        assert perfect == whole.complete(request)[0].tokens
    assert first != perfect


def config(folder: Path, parent: Path, *callbacks: Any) -> Any:
    """Return a run that trains a student for the model of `parent`."""
    student = drawn_run(folder, *callbacks)
    student.model = XllmOptions(start_state="zero", injection="orthogonal", student=2)
    student.loss = StudentLoss.Config()
    student.recurrence = RecurrenceConfig(steps=Schedule.constant(STEPS))
    student.checkpoint.carry.parent = str(parent)
    student.checkpoint.carry.optimizer = False
    student.checkpoint.carry.keep_initial = ["student.*"]
    return student


def train_student(folder: Path, parent: Path, world: int) -> None:
    act_as_launched(world)
    train_run(config(folder, parent, TeacherStart()))


@pytest.mark.multiprocess
@pytest.mark.usefixtures("alone")
def test_two_ranks_train_the_student_of_one(gloo_pool, tmp_path: Path):
    train_run(drawn_run(tmp_path / "parent"))
    losses = {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        run = gloo_pool(world).run if world > 1 else lambda case, *args: case(*args)
        run(train_student, folder, tmp_path / "parent", world)
        losses[world] = [record["loss"] for record in RunDirectory(folder).read_metrics()]
        before, after = (
            CheckpointReader(SavedRun(path).checkpoint().path)
            for path in (tmp_path / "parent", folder)
        )
        parent = {*before.tensor_keys()}
        names = {name for name in after.tensor_keys() if name in parent or "student." in name}
        changed = {
            name
            for name in names
            if name not in parent or not torch.equal(after.read(name), before.read(name))
        }
        assert changed
        assert all("student." in name for name in changed)
    assert losses[1] == pytest.approx(losses[2], rel=RELATIVE_TOLERANCE)
    assert losses[1][-1] < losses[1][0]
