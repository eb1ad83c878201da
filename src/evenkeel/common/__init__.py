"""What any other part may use. Nothing here knows of models, data or ranks.

    arguments   command lines: empty words, tyro's errors as one line
    deadlines   points in time at which a wait ends
    display     all text that goes to a terminal, and the live line there
    errors      errors that end a program with one line, and exit codes
    files       files that are whole or absent, JSON as it was written, locks, growing files
    keeper_link  a rank's messages to its keeper, and what it knows of it
    keyboard    Ctrl-C as a flag that a loop checks
    memory      reuse of freed memory, and out-of-memory errors
    naming      names of metrics, ranks and types in messages
    network     this node's address, and whether node 0 answers
    package_name  valid names for a user's package; for tools without torch
    phases      what this process is doing, and where its seconds went
    processes   other processes of this machine: state, signals, torchrun, loader processes
    repeats     errors that may come at every step, logged now and then
    user_code   a user's class by FILE.py:CLASS, what to do about its errors
    versions    versions of packages as numbers

What is not here: options (`evenkeel.config`), signals that stop a run (`resilience`), process groups (`distributed`),
the files of a run (`run`). Except `memory`, nothing here imports torch, so that a bad command line is refused at once.
"""
