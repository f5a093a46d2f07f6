"""The stack that the engine calls: caches, contexts, and rows at different steps."""

import torch

from tests.inference.reference import make_model
from titan_loop.inference.cache import FullCache
from titan_loop.inference.stack import LoopState, Stack
from titan_loop.models.decoder import LoopDecoder


def model_of(**options: object) -> LoopDecoder:
    return make_model(injection="diagonal", coda_layers=1, n_layers=3, **options).double()


@torch.no_grad()
def test_tokens_see_the_keys_up_to_their_own_position():
    stack = Stack(model_of())
    cache = stack.make_cache(FullCache, steps=3, rows=2, capacity=5)
    together = stack.token_context(torch.tensor([[2], [2]]), cache)
    assert together.attention_mask is None
    apart = stack.token_context(torch.tensor([[2], [0]]), cache)
    assert apart.attention_mask.tolist() == [[[[True] * 3]], [[[True, False, False]]]]
    assert apart.positions_BL.tolist() == [[2], [0]]


@torch.no_grad()
def test_rows_at_different_steps_go_on_as_each_alone():
    """Row 0 goes from step 2 to 3, row 1 starts, row 2 goes from 1 to 2."""
    model, tokens = model_of(), torch.tensor([[5], [6], [7]])

    def at(row: int, step: int) -> list[LoopState]:
        """Return the states of a row after every step up to `step`."""
        stack = Stack(model)
        cache = stack.make_cache(FullCache, steps=3, rows=1, capacity=1)
        cache.admit(1)
        context = stack.token_context(torch.zeros(1, 1, dtype=torch.int64), cache)
        states = [stack.step(None, tokens[row : row + 1], [1], context)]
        for number in range(2, step + 1):
            states.append(stack.step(states[-1], None, [number], context))
        return states

    before, after = ([at(0, 3)[i], at(1, 1)[0], at(2, 2)[j]] for i, j in ((1, 0), (2, 1)))

    def rows(states: list[LoopState]) -> LoopState:
        carries = [torch.utils._pytree.tree_leaves(state.carry) for state in states]
        spec = torch.utils._pytree.tree_structure(states[0].carry)
        leaves = [torch.cat(parts) for parts in zip(*carries, strict=True)]
        carry = torch.utils._pytree.tree_unflatten(leaves, spec)
        return LoopState(carry, *(torch.cat(part) for part in list(zip(*states, strict=True))[1:]))

    stack, done, advance = Stack(model), [], model.advance

    def told(carry, hidden, step, context):
        done.append(torch.as_tensor(step).tolist())
        return advance(carry, hidden, step, context)

    model.advance = told  # type: ignore[method-assign]
    cache = stack.make_cache(FullCache, steps=3, rows=3, capacity=1)
    cache.admit(3)
    context = stack.token_context(torch.zeros(3, 1, dtype=torch.int64), cache)
    state = stack.step(rows(before), tokens, [3, 1, 2], context)
    for got, want in zip(
        torch.utils._pytree.tree_leaves(state),
        torch.utils._pytree.tree_leaves(rows(after)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    # Rows that share a step beyond the first go on, although tokens are given.
    step = stack.step(rows([at(0, 1)[0]] * 3), tokens[:1].expand(3, 1), [2, 2, 2], context)
    torch.testing.assert_close(step.hidden_BLD[0], at(0, 2)[1].hidden_BLD[0], rtol=1e-5, atol=1e-6)
    stack.step(rows([at(0, 1)[0]] * 3), None, [2, 3, 2], context)
    assert done == [[2, 1, 1], 1, 1, [1, 2, 1]]  # the second 1 is the comparison's
    unread = stack.step(rows(before), tokens, [3, 1, 2], context, reads=False)
    assert torch.equal(unread.read_BLD, unread.hidden_BLD)
    assert not torch.equal(state.read_BLD, state.hidden_BLD)
