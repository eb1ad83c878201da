"""Containers: the command that starts one, and what runs inside.

    docker_run.py     options of docker/run.py; the `docker run` or `podman run` command line
    container.py      process 1 of the container: forwards signals, reaps orphans, exits with the job's exit code
    container_job.py  the job as its child: checks network, mounts and devices, then runs torchrun's agent

Not here: the health check (`resilience.heartbeat`) and the image (docker/Dockerfile). Optional: delete this folder
with docker/, tests/launch/docker, tests/docker and tests/processes/test_container.py.
"""
