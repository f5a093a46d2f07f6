"""Parts that tests share: a pool of gloo processes, small real parts, and hardware marks.

    parent (pytest)                         ranks (started once per world size and session)
    get_pool(4).run(case, *args)  ─ queue ─▶ case(*args) on every rank, in one default gloo group
    [result of rank 0, …, 3]      ◀─ queue ─ result, or a traceback

May import everything in titan_loop; only tests and benchmarks, ours and users', may import it.
"""
