"""The two files an exported folder carries, so that transformers can run it; never imported here.

transformers loads them by themselves with `trust_remote_code=True`. They therefore import nothing
of titan_loop, and only names that both transformers 4.57 and 5.x have.
"""
