"""What tests share: a pool of gloo processes and hardware marks; users' tests may import it, too.

    parent (pytest)                         ranks (spawned once per world size and session)
    get_pool(4).run(case, *args)  ── pipe ─▶ case(*args) on every rank, in one default gloo group
    [result of rank 0, …, 3]      ◀─ pipe ── result, or a traceback

May import everything in titan_loop; nothing but tests may import it.
"""
