"""What most tests import sooner or later, imported at once and spared in garbage collection.

Runs, rehearsals and dynamo collect garbage often, and half a million objects of modules hold none.
Processes forked after this share these objects' pages.
"""

# ruff: noqa: F401
import gc

import titan_loop.compat as compat  # before any torchtitan module
import torch._inductor.compile_fx

import tests.support.tiny

gc.collect()
gc.freeze()
