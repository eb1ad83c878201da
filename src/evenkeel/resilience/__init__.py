"""What ends a job too early, and how the surviving ranks react. See docs/what-happens.md.

    keeper        forks the process that trains, and forks it again when it dies: a restart without imports
    forking       whether a process may fork one
    memory_checkpoint  the last step in memory, for the next rank; its keeper writes it to the disk
    memory_offers  how other ranks of its machine read it
    slot_files    the same of a sharded run
    peers         messages between keepers in the job's store
    keeper_store  the process that serves that store, where torchrun's agent does not
    interruption  a thread for stop signals: saves the state, and ends the process within --grace
    resident      the same in a notebook, which goes on: takes no signals
    hang          every rank reports to the others what it does; no progress for --hang-timeout is a hang
    news          with these reports: rank 0's saved steps, for other nodes
    diagnosis     after an alarm: which rank is where, its stacks; kills frozen ranks
    late_dump     stacks of a process in which not even that thread can run
    beats         what ranks last reported, and whose fault a hang may be
    flight_recorder  the last collectives of each rank after a hang, for torchfrtrace, and its verdict
    heartbeat     each rank writes a file once a second, for the health check of a container

What is not here: what is saved and how (`run`), a state that is whole between two steps (`training`), the restart of
a keeper or a node, which is torchrun's, and losses that are not finite (`training.nonfinite`).
"""
