"""A small server for one looped model: OpenAI's protocol, and a page that shows the steps.

    HTTP ─ asking ─► ServedRow ─► Scheduler's queue ─► engine thread ─ pieces ─► answering ─► HTTP
                                                          │
                   rows join and leave between applications of the stack (continuous depth batching,
                   arXiv 2608.09444); each row has its own depth, exit policy and sampling

Needs the extra `serve`: Starlette, uvicorn, prometheus-client.
"""

import titan_loop.compat  # noqa: F401  (before any torchtitan module)
