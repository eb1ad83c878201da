"""`python -m evenkeel doctor`: check the machines before a job, and print the command that fixes each problem.

    command.py      the options
    visit.py        which checks in which order, alone or on all ranks of torchrun, and the exit code
    findings.py     a finding, a check that may crash or hang, findings of many ranks as one, print and JSON
    software.py     versions of Python, torch, CUDA, driver, NCCL and torchvision, and whether they match
    devices.py      GPUs, who uses them, which rank has which; products and copies of all ranks compared
    host.py         cores, /dev/shm, limits, contradicting variables, W&B
    storage.py      the run directory: writable, space, speed, and one folder for all nodes
    network.py      host name, address and port of node 0; the job's store, where the ranks' findings are collected
    collectives.py  the process group: all-reduce, all-to-all and broadcast right and how fast; the clocks

A check is a function that returns findings. If it raises, that is a warning. To add one, write it in the file of its
subject and name it in `visit.py`. A check of one process goes to `local_checks`; one of all ranks together goes to
`joint_checks`, and every rank must call the same collectives in it.

Nothing imports this folder but `__main__.py` and tests; the launchers' --doctor starts it as a command. So it may be
deleted with `tests/cli/doctor`, `tests/processes/test_doctor.py` and `tests/nodes/test_doctor.py`.

Not here: refusals of a job that cannot run (`distributed`, `launch`, `run`); the doctor uses those and adds to them.
"""
