"""Generation from a looped model: every depth, every exit policy, four ways to keep the cache.

    text ─ tokenizer ─► Request ─► Engine ─► prefill, all recurrent steps ─► first token
                                     │
             one stack application ◄─┴─ rows at different tokens *and* different recurrent steps
                     │
         ExitDecider: stay (next application) or leave ─► readout ─ sample ─► GeneratedToken

`SelfSpeculation` replaces the lower half: shallow steps draft, deep steps verify.

Shape suffixes are as in `models/`; in addition, S is the number of keys that a query may see, and 2
stands for keys and values. L is 1 while decoding, except in a verification.
"""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
