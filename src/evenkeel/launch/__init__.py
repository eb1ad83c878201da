"""Launchers: from a topology (nodes, GPUs per node, rank of this node) to the exact command that starts the job.

Everything that can be refused is refused here, in one line, before a process starts. Then the launcher becomes the
command, so that signals reach it directly.

    topology.py   the topology, its checks, and the torchrun command line with its environment
    launchers.py  options of launch/single_node.py and launch/multi_node.py; also `train.py -n 2 -g 4 -nr 0`
    limits.py     --time and --mem as people type them for a cluster
    fit.py        `evenkeel.fit`: train.py in one call, in this process or by torchrun
    start.py      the main program of a training script: from its arguments to an exit code
    agent.py      runs torchrun in its own process and turns its result into an exit code: 0, 75, 2, 137
    slurm/        submit to Slurm and follow the job; optional: delete it with the folder slurm/ and its tests
    docker/       start a node in a container, and the container's process 1; optional: delete it with docker/
    k8s/          submit to Kubernetes; optional: delete it with the folder k8s/ and its tests

Not here: what a rank does once it runs (`distributed`, `run`), addresses and interfaces (`common.network`), and
`python -m evenkeel status` (`cli`). The engine never imports this component; only train.py and cli do.
"""
