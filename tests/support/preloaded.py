"""What most tests import sooner or later, imported at once and spared by the collector of garbage.

Runs, rehearsals and dynamo collect garbage often, and there is none in half a million objects of
modules. A process that is forked after this shares their pages as well.
"""

import gc

import titan_loop.compat as compat  # noqa: F401 (before any torchtitan module)
import torch._inductor.compile_fx

import tests.support.tiny  # noqa: F401

gc.collect()
gc.freeze()
