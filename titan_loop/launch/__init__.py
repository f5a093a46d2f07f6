"""Training as a chain of jobs: one for each stage, which is started again until the stage is done.

    titan-loop slurm submit ─► script ─► Scheduler.submit, each after its parent's       submit
    the job: titan-loop slurm run ─► node check ─► a rank a GPU: titan-loop train    job, health
        time limit ─► SIGUSR1 ─► ranks ─► save, exit 75 ─► Scheduler.start_again            job

`scheduler.py` is the protocol, `slurm.py` implements it for SLURM, `local.py` with processes
of this machine. Only `submit` and the node check import torch. `slurm/README.md` is the manual.
"""
