#!/usr/bin/env bash
# torchtitan 0.3.0: a module whose `forward` has a positional argument with a default may be called
# without it, until a placement of any input is declared in its `ShardingConfig`. Then the wrapper of
# `parallelize` looks for every positional argument in what was passed and raises `KeyError` with its
# name; the default is never used. Passed by position or by name the same call works, and so does a
# keyword-only argument with a default.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    torchtitan==0.3.0 triton==3.5.0 # which the CPU wheel of torch lacks and torchtitan imports
"$folder/venv/bin/python" - <<'PYTHON'
from dataclasses import dataclass

import spmd_types as spmd
import torch
import torch.distributed as dist
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder_sharding import dense_activation_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig


class Scaled(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config):
        super().__init__()

    def forward(self, x, factor=2.0):
        return x * factor


class ScaledByName(Scaled):
    @dataclass(kw_only=True, slots=True)
    class Config(Scaled.Config):
        pass

    def forward(self, x, *, factor=2.0):
        return x * factor


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dims = ParallelDims.from_config(ParallelismConfig(spmd_backend="partial_dtensor"), 1)
whole = dense_activation_placement(tp=spmd.R)
seen = {}
for kind in (Scaled, ScaledByName):
    for placed in (False, True):
        config = kind.Config()
        if placed:
            config.sharding_config = ShardingConfig(in_src_shardings={"x": whole})
        module = config.build()
        module.parallelize(dims)
        try:
            seen[kind.__name__, placed] = module(torch.ones(1, 2, 4)).sum().item()
        except KeyError as error:
            seen[kind.__name__, placed] = repr(error)
        assert module(torch.ones(1, 2, 4), factor=2.0).sum().item() == 16.0
for name, result in seen.items():
    print(*name, result)
# Seen: Scaled False 16.0, Scaled True KeyError('factor'), ScaledByName False 16.0, ScaledByName True 16.0.
assert list(seen.values()) == [16.0, "KeyError('factor')", 16.0, 16.0]
PYTHON
