"""Training under SLURM: one job for each stage, which requeues itself until the stage is done.

    titan-loop slurm submit ─► script ─► sbatch, chained by afterok              submit, chain
    the job: titan-loop slurm run ─► node check ─► srun titan-loop train   job, health, node_check
        time limit ─► SIGUSR1 ─► srun ─► ranks ─► save, exit 75 ─► scontrol requeue       requeue

Only `submit` and the node check import torch. The manual is `slurm/README.md` in the repository.
"""
