"""Training under SLURM: one job a stage, which starts itself again until the stage is done.

    titan-loop slurm submit ─► script ─► sbatch, chained by afterok        script, submit, chain
    the job: titan-loop slurm run ─► node check ─► srun titan-loop train   job, health, node_check
        time limit ─► SIGUSR1 ─► srun ─► ranks ─► save, exit 75 ─► scontrol requeue       requeue

Everything but `submit` and the node check works without torch. The manual is `slurm/README.md` in
the repository.
"""
