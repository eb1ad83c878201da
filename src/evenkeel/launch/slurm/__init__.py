"""Slurm: submit a job, start its nodes, requeue it until it is finished, follow it.

    submission.py  options of slurm/submit.py; writes the script and submits it through submitit
    cluster.py     partitions, their nodes, GPUs and time limits: what a request is checked against
    code.py        the copy of the code that a queued job runs
    node.py        one node's share of a job: the task that runs torchrun's agent; counts fruitless requeues
    jobs.py        the state of jobs by squeue and sacct, and the record RUN_DIR/slurm/job.json
    follow.py      the log and the state of a job, for `python -m evenkeel follow`
    job.sh         sourced by the script of every job: decides by the exit code whether the job is requeued

slurm/train.sbatch does without submission.py.

Not here: saving on a signal (`resilience`), and continuing (`run`). Optional: delete this folder with slurm/,
tests/launch/slurm, tests/cluster and tests/processes/test_slurm.py.
"""
