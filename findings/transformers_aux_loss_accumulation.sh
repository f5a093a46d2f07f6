#!/usr/bin/env bash
# transformers 5.24.0: `Trainer` divides the summed cross entropy by the number of tokens in all micro-batches of a step, so
# it no longer divides the model's loss by `gradient_accumulation_steps`. The router's balance loss of a mixture of experts
# (`output_router_logits`) is a mean over one micro-batch that the model adds to this loss, and nothing divides it: its
# gradient and its share of the logged loss grow with the number of accumulation steps. Here all rows
# are the same, so that every split of eight rows has the same gradient; with eight steps the
# effective `router_aux_loss_coef` is eight times the configured one. The cross entropy is not affected.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0
cat >"$folder/try.py" <<'PYTHON'
import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
ids = torch.randint(1, 64, (33,))
rows = [{"input_ids": ids, "labels": ids}] * 8


class Recording(torch.optim.SGD):
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        self.seen = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in parameters])


def train(accumulated, coefficient):
    """Return the gradient of one step over eight rows and the loss that the trainer logs for it."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    model = Qwen3MoeForCausalLM(config)
    optimizer = Recording(model.parameters(), lr=0.0)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8 // accumulated,
        gradient_accumulation_steps=accumulated,
        max_steps=1,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    return optimizer.seen, trainer.state.log_history[0]["loss"]


print("transformers", transformers.__version__)
first = None
for accumulated in (1, 2, 4, 8):
    (text, text_loss), (whole, whole_loss) = train(accumulated, 0.0), train(accumulated, 1.0)
    balance = whole - text
    first = first or (text, balance, whole_loss - text_loss)
    ratios = [float(now.norm() / then.norm()) for now, then in zip((text, balance), first)]
    ratios.append((whole_loss - text_loss) / first[2])
    print(f"{accumulated} micro-batches: gradient of cross entropy x {ratios[0]:.2f}, of the balance loss x ", end="")
    print(f"{ratios[1]:.2f}; logged balance loss x {ratios[2]:.2f}")
    assert abs(ratios[0] - 1) < 1e-3
    assert all(abs(ratio / accumulated - 1) < 1e-2 for ratio in ratios[1:]), "it has changed"
PYTHON
cd "$folder"
"$folder/venv/bin/python" try.py 2>log | grep -v "^{" || { tail -n 20 log; exit 1; }
# Output on 2026-12-01:
# transformers 5.24.0
# 1 micro-batches: gradient of cross entropy x 1.00, of the balance loss x 1.00; logged balance loss x 1.00
# 2 micro-batches: gradient of cross entropy x 1.00, of the balance loss x 2.00; logged balance loss x 2.00
# 4 micro-batches: gradient of cross entropy x 1.00, of the balance loss x 4.00; logged balance loss x 4.00
# 8 micro-batches: gradient of cross entropy x 1.00, of the balance loss x 8.00; logged balance loss x 8.00
