#!/usr/bin/env bash
# torch 2.13.0: a recurrence in `torch.while_loop` whose first state needs no gradient (zeros or noise,
# as some looped models start) gives its weights the gradient of the last step alone, without a warning,
# eagerly and compiled. The values are right, and so is every gradient once the first state asks for one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6 setuptools==80.9.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch

STEPS = 4
torch.manual_seed(0)
weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
embedding = torch.randn(3, 8, dtype=torch.float64)


def step(state):
    return torch.tanh(state @ weight + embedding)


def looped(state):
    count = torch.tensor(0)
    return torch.while_loop(lambda n, _: n < STEPS, lambda n, s: (n + 1, step(s)), (count, state))[1]


def gradient(last):
    (found,) = torch.autograd.grad(last.square().sum(), weight)
    return found


def unrolled(state, *, through=STEPS):
    for number in range(STEPS):
        with torch.set_grad_enabled(number >= STEPS - through):
            state = step(state)
    return state


def off(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


for needs_gradient in (True, False):
    start = torch.randn(3, 8, dtype=torch.float64, requires_grad=needs_gradient)
    for name, run in (("eager", looped), ("compiled", torch.compile(looped, fullgraph=True))):
        last = run(start)
        torch.testing.assert_close(last, unrolled(start))
        found = gradient(last)
        whole, one = off(found, gradient(unrolled(start))), off(found, gradient(unrolled(start, through=1)))
        print(f"start with gradient {needs_gradient}, {name}: ", end="")
        print(f"{whole:.3f} from the gradient of all steps, {one:.3f} from the last step's")
        # Seen: 0.000 and 3.526 with a gradient, 0.983 and 0.000 without, eagerly and compiled.
        right, wrong = (whole, one) if needs_gradient else (one, whole)
        assert right < 1e-9
        assert wrong > 0.1
PYTHON
