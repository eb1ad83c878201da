"""Go back to a step of a run and look into it. Reads the run; only `audit` writes, audit.json.

    command.py     replay: the options, and what is printed
    page.py        replay --html: the same as a page
    replay.py      run again from the newest kept checkpoint, in a folder of its own, to the steps asked for
    ranks.py       replay --ranks: the same on several processes
    look.py        what there is to see in a step: losses of samples, norms, activations
    culprit.py     the first operation whose result is not finite
    save.py        --save-samples: pictures, text, tensors
    names.py       a sample's file or shard
    agreement.py   whether the replay computes what the run has recorded
    bisect.py      where two runs part that should be the same: step, tensor, operation
    bisect_command.py   bisect: the options, and what is printed
    audit.py       whether a run is what its ledger says; parts of it are run again
    audit_command.py    audit: the options, and what is printed
    trace.py       what a step computes, in order, as digests

Not here: the loop and its steps, which are those of `Run` (run/) and train.py.
"""
