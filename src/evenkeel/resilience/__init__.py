"""What ends a job before its time, noticed by those who survive it. See docs/what-happens.md.

    keeper        forks what trains, and forks it again when it has died: a restart without imports
    memory_checkpoint  the last step in memory, for the next rank; its keeper writes it to the disk
    peers         what keepers tell each other in the job's store, and the process that holds it
    interruption  takes stop signals in a thread, has the state saved, and ends the process within --grace
    hang          every rank tells the others what it does; no progress for --hang-timeout is a hang
    flight_recorder  the last collectives of each rank after a hang, for torchfrtrace, and its verdict
    heartbeat     each rank writes a file once a second, for the health check of a container

What is not here: what is saved and how (`run`), a state that is whole between two steps (`training`), the restart of
a keeper or a node, which is torchrun's, and losses that are not finite (`training.nonfinite`).
"""
