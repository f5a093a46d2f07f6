"""The latent family: each mechanism is what the paper's equations say, in float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contracts.families import random_model
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.errors import UserError
from titan_loop.evaluation.exam import example_windows
from titan_loop.families.latent.model import LatentDecoder, LatentOptions
from titan_loop.families.latent.objective import LatentSupervision
from titan_loop.interactive import LoopModel
from titan_loop.models.dropout import seed_dropout
from titan_loop.models.family import build_decoder
from titan_loop.training.batch_schedule import BatchConfig
from titan_loop.training.preflight import examined
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer
from train_configs.latent.solved import share_solved
from train_configs.latent.task import DagArithmetic

EXACT = 1e-10  # float64; sums in another order
TASK = DagArithmetic(
    modulus=5, nodes=10, leaves=3, names=16, operations="+-", most_depth=4, test_nodes=(5, 10)
)
EMPTY, STEPS, LENGTH = 5, 4, 80
OPTIONS = LatentOptions(vocab_size=7, factors=(5, 17, 3), relative_window=8)
Columns = dict[str, Tensor]


def test_by_rows_gives_a_factor_its_share_of_the_variance():
    torch.manual_seed(0)
    options = replace(OPTIONS, dim=256, hidden_dim=256, initial_weights="by_rows")
    model = build_decoder(options, max_seq_len=LENGTH)
    for table in model.tok_embeddings.weight.detach().split((7, 5, 17, 3)):  # 32 rows
        assert float(table.var()) == pytest.approx(len(table) / 32, rel=0.25)


def model_of(**options) -> LatentDecoder:
    model = random_model(replace(OPTIONS, **options), LENGTH)
    assert isinstance(model, LatentDecoder)
    return model


def windows(count: int = 3, key: int = 0) -> tuple[Tensor, Tensor, Tensor, Columns]:
    """Return packed windows of graphs: tokens, positions, labels and columns."""
    loader = TaskLoader.Config(task=TASK, all_targets=True, seed=key, prefetch=False)
    split = {"dp_world_size": 1, "dp_rank": 0, "local_batch_size": count, "seq_len": LENGTH}
    ((columns, labels),) = loader.build(**split).read_step(count)
    return columns.pop("input"), columns.pop("positions"), labels, columns


def block(model: LatentDecoder, embedded: Tensor, positions: Tensor) -> Tensor:
    """Apply layers and norm to E."""
    context = model.make_context(positions, positions)
    for layer in model.layers.values():
        embedded = layer(embedded, context)
    return model.norm(embedded)


def embed(model: LatentDecoder, factors: Tensor) -> Tensor:
    """Sum Emb_f(z_f) over f, each from its own table."""
    tables = model.tok_embeddings.weight.split(model.config.sizes)
    return sum(table[factors[..., f]] for f, table in enumerate(tables))  # type: ignore[return-value]


LEARNED = {"positions": "learned", "learned_positions": LENGTH, "relative_window": None}


def vectors(model: LatentDecoder, positions: Tensor) -> Tensor:
    """Return what a model with learned positions adds to every embedding."""
    (table,) = model.positions.tables()
    assert isinstance(table, torch.nn.Embedding)
    return table.weight[positions]


@torch.no_grad()
@pytest.mark.parametrize("places", [{}, LEARNED], ids=["by distance", "learned"])
@pytest.mark.parametrize("state", ["discrete", "continuous"])
def test_the_forward_pass_is_the_papers_recurrence(state, places):
    model = model_of(state=state, **places).eval()
    tokens, positions, _, columns = windows()
    found = model(tokens, positions, recurrent_steps=STEPS, columns=columns).hidden_RBLD
    added = vectors(model, positions) if places else 0.0
    embedded = embed(model, torch.cat([tokens[..., None], columns["factors"]], -1)) + added
    changed = 0
    for hidden in found:
        wanted = block(model, embedded, positions)
        torch.testing.assert_close(hidden, wanted, atol=EXACT, rtol=0)
        embedded = wanted
        if state == "discrete":
            readouts = model.lm_head.weight.split(model.config.sizes)
            factors = torch.stack([(wanted @ w.T).argmax(-1) for w in readouts], -1)
            changed += int((factors[..., 0] != tokens).sum())
            embedded = embed(model, factors) + added
    assert state == "continuous" or changed


def told(columns: Columns, step: int) -> Tensor:
    """Return the value factor after `step` steps, position by position."""
    pairs = zip(
        columns["depth"].flatten().tolist(), columns["solved"].flatten().tolist(), strict=True
    )
    values = [solved if depth <= step else EMPTY for depth, solved in pairs]
    return torch.tensor(values).view(columns["depth"].shape)


@pytest.mark.parametrize("places", [{}, LEARNED], ids=["by distance", "learned"])
def test_folded_steps_equal_the_loop_in_loss_and_gradients(places):
    """One pass over T·B rows is T passes, each told what the step before should have said."""
    tokens, positions, labels, columns = windows()
    model = model_of(**places).train()
    loss = supervision(model)
    output = model(tokens, positions, recurrent_steps=STEPS, columns=columns)
    assert len(output.hidden_RBLD) == STEPS
    folded, metrics = loss(output, labels, 10.0, columns=columns)
    folded.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())

    model.zero_grad()
    looped = torch.zeros((), dtype=torch.float64)
    for step in range(1, STEPS + 1):
        before = told(columns, step - 1)
        embedded = embed(model, torch.cat([before[..., None], columns["factors"]], -1))
        embedded = embedded + (vectors(model, positions) if places else 0.0)
        hidden = block(model, embedded, positions)
        torch.testing.assert_close(output.hidden_RBLD[step - 1], hidden, atol=EXACT, rtol=0)
        targets = [told({**columns, "solved": labels}, step), *columns["factors"].unbind(-1)]
        of_step = [
            F.cross_entropy((hidden @ w.T).flatten(0, 1), y.flatten(), reduction="sum") / 10
            for w, y in zip(model.lm_head.weight.split(model.config.sizes), targets, strict=True)
        ]
        torch.testing.assert_close(metrics[f"ce/step_{step}"], of_step[0].detach())
        looped = looped + sum(of_step)
    looped.backward()
    torch.testing.assert_close(folded, looped, atol=EXACT, rtol=EXACT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=EXACT, rtol=EXACT)


def supervision(model: LatentDecoder, **settings: bool) -> LatentSupervision:
    loss = LatentSupervision(LatentSupervision.Config(**settings))
    loss.set_lm_head(model.lm_head)
    return loss


def test_the_masked_loss_leaves_out_what_is_not_due():
    tokens, positions, labels, columns = windows()
    answers = torch.where(columns["depth"] > 0, labels, -100)
    model = model_of(state="continuous").train()
    output = model(tokens, positions, recurrent_steps=2, columns=columns)
    _, metrics = supervision(model, masked=True)(output, answers, 1.0, columns=columns)
    for step, hidden in enumerate(output.hidden_RBLD, start=1):
        due = (columns["depth"] > 0) & (columns["depth"] <= step)
        logits = hidden[due] @ model.lm_head.weight[:7].T
        wanted = F.cross_entropy(logits, labels[due], reduction="sum")
        torch.testing.assert_close(metrics[f"ce/step_{step}"], wanted.detach())


def test_values_that_are_due_can_be_corrupted_instead():
    model = model_of(corruption=1.0, corrupted_share=1.0, corrupted="due").train()
    _, _, _, columns = windows(200)
    values = model.told(columns, STEPS)
    clean = torch.stack([told(columns, step) for step in range(STEPS)])
    due = torch.stack([columns["depth"] == step + 1 for step in range(STEPS)])
    assert torch.equal(values[~due], clean[~due])
    assert (clean[due] == EMPTY).all()
    assert (values != clean)[due].double().mean() == pytest.approx(6 / 7, abs=0.03)


def test_a_graph_is_solved_where_every_factor_is_right():
    examples = [
        TASK.encode(graph) for graph in TASK.held_out_questions(40, TASK.strata["10_nodes"])
    ]
    model = Oracle(TASK, examples)
    deepest = max(example.steps for example in examples)
    assert share_solved(model, TASK, "10_nodes", count=40) == (1.0, deepest + 1)
    model.wrong = {(3, 0, 1), (3, 2, 0), (35, len(examples[35].tokens) - 1, 3)}
    assert share_solved(model, TASK, "10_nodes", count=40)[0] == 38 / 40
    shortest = min(range(40), key=lambda row: len(examples[row].tokens))
    model.wrong = {(shortest, len(examples[shortest].tokens), 0)}  # padding
    assert share_solved(model, TASK, "10_nodes", count=40)[0] == 1.0


class Oracle:
    """Says every graph's solution but for some factors: (graph, position, factor)."""

    config = SimpleNamespace(max_seq_len=LENGTH)

    def __init__(self, task: DagArithmetic, examples: list) -> None:
        windows = example_windows("", examples, task.columns, room=LENGTH)
        columns = windows.columns
        self.told = torch.cat([columns["solved"].unsqueeze(-1), columns["factors"]], dim=-1)
        self.sizes = (task.vocab_size, *task.factor_sizes)
        self.wrong: set[tuple[int, int, int]] = set()
        self.read = 0

    def __call__(self, tokens: Tensor, *_: Tensor, **__: object) -> SimpleNamespace:
        first = self.read % len(self.told)
        self.read += len(tokens)
        said = self.told.clone()
        for where in self.wrong:
            said[where] = (said[where] + 1) % self.sizes[where[-1]]
        return SimpleNamespace(hidden_RBLD=[said[first : first + len(tokens)]])

    def lm_head(self, said: Tensor, *, factors: bool) -> list[Tensor]:
        assert factors
        return [F.one_hot(said[..., f], size) for f, size in enumerate(self.sizes)]


def test_corruption_replaces_some_values_of_the_step_before_and_repeats():
    model = model_of(corruption=0.5, corrupted_share=0.5).train()
    _, _, _, columns = windows(200)
    seed_dropout(model, 1, 2)
    values = model.told(columns, STEPS)
    seed_dropout(model, 1, 2)
    assert torch.equal(values, model.told(columns, STEPS))
    seed_dropout(model, 1, 3)
    assert not torch.equal(values, model.told(columns, STEPS))
    clean = torch.stack([told(columns, step) for step in range(STEPS)])
    new = torch.stack([columns["depth"] == step for step in range(STEPS)])
    new[0] = False
    assert torch.equal(values[~new], clean[~new])
    changed = (values != clean)[new].double().mean()
    # half of the graphs and steps, half of the values, 6 of 7 draws differ; rows share a coin, so
    # that 600 coins decide: five standard deviations are 0.05
    assert abs(changed - 0.5 * 0.5 * 6 / 7) < 0.05
    assert set(values[new].tolist()) == set(range(7))
    assert torch.equal(model.eval().told(columns, STEPS), clean)
    assert model_of().corruption is None


def test_the_head_reads_the_value_for_everybody_else():
    model = model_of()
    state = torch.randn(2, 6, 64, dtype=torch.float64, requires_grad=True)
    logits = model.lm_head(state)
    factors = model.lm_head(state, factors=True)
    assert [part.shape[-1] for part in factors] == [7, 5, 17, 3]
    torch.testing.assert_close(logits, factors[0], rtol=1e-12, atol=1e-12)
    labels = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(0))
    weight = torch.full((1, 2, 6), 0.5, dtype=torch.float64)
    loss, _ = model.lm_head((state,), labels_BL=labels, weight_RBL=weight)
    wanted = 0.5 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted)
    (of_loss,) = torch.autograd.grad(loss, model.lm_head.weight)
    (of_wanted,) = torch.autograd.grad(wanted, model.lm_head.weight)
    torch.testing.assert_close(of_loss, of_wanted)


def run(**changed) -> LoopTrainer.Config:
    config = LoopTrainer.Config(
        total_tokens=4 * LENGTH,
        model=replace(OPTIONS, vocab_size=None, factors=None),
        dataloader=TaskLoader.Config(task=TASK, all_targets=True),
        loss=LatentSupervision.Config(),
        batch=BatchConfig(global_batch_tokens=Schedule.constant(16 * LENGTH)),
    )
    config.training.seq_len = LENGTH
    for name, value in changed.items():
        *path, last = name.split("__")
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return config


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model__factors": (5, 16, 3)}, "(5, 16, 3) is too small: the data needs"),
        ({"parallelism__tensor_parallel_degree": 2}, "does not work with model.family=latent"),
        ({"parallelism__context_parallel_degree": 2}, "does not work with model.family=latent"),
        ({"dataloader": TaskLoader.Config()}, "the loss reads factors, depth"),
        (
            {"recurrence__from_data": True, "recurrence__max_steps": 3},
            "recurrence.max_steps=3 is less than the 4 steps that the deepest examples need",
        ),
        (
            {"recurrence__steps": Schedule.constant(3)},
            "recurrence.steps='3' is less than the 4 steps of the deepest examples",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused(changed, message):
    assert message in str(examined(run(**changed), 2, {}).refusals[0])


def test_python_refuses_texts_by_the_familys_name():
    model = LoopModel(build_decoder(OPTIONS, max_seq_len=LENGTH), 2, read_text=pytest.fail)
    for words, wrong in {
        "reads depth, factors, solved beside tokens": lambda: model.states(torch.tensor([1])),
        "does not support generate": lambda: model.generate("x"),
        "does not support held_out": lambda: model.bits_per_byte("x"),
    }.items():
        with pytest.raises(UserError, match=f"model.family=latent {words}"):
            wrong()
