"""`--mirror URL`: whole checkpoints in an object store, so that a run outlives the disks of its nodes.

    store.py    a run in a store, by fsspec: a checkpoint's manifest is written last, and checked when read
    lease.py    an object that says which job writes there; a second job is refused
    copying.py  the process, one per node, that fetches before the start and copies while the job runs
    attach.py   starts that process around torchrun (launch/agent.py), and waits for it at the end
    command.py  a local copy for `evenkeel checkpoint list URL` and other commands

A process and no thread of rank 0: it outlives killed ranks, and takes no time of the training's interpreter. Optional:
delete it with tests/mirror, tests/processes/test_mirror.py and docs/mirror.md.
"""
