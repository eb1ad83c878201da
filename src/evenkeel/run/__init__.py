"""One run across all its restarts; rank 0 owns its files.

    run.py            Run: open, its steps, and what comes after each; every rank calls the same methods
    attempt.py        how an attempt begins: all ranks agree on data, options and cut
    agreement.py      what all ranks must agree on: options, cut, bits
    start_checks.py   --mirror without a mirror, warnings before the first step, the disk that --keep-every needs
    data_check.py     all ranks, and all starts, read the same samples
    resume.py         the newest whole state of any node, on all ranks
    resume_report.py  what rank 0 logs of it
    build.py          this process, the data, the model and the state before the first step
    step_log.py       the line of metrics of a step, and warnings beside it
    evaluator.py      evaluations of the present state
    checkpointer.py   when a checkpoint is due, and what came of it
    state_files.py    the files of a checkpoint that hold its state; joining those of a sharded run
    saver.py          checkpoints beside the steps, and the rescue of the last finished one
    stored.py         writes what a rank has stored in memory to the disk, for its keeper
    sharded_saver.py  the same on every rank of a sharded run, which saves its rows (--shard on)
    sharded_checkpoint.py  the rows of a rank in files, and the name that a checkpoint gets when all are there
    sharded_resume.py  each rank's rows, from memory or from files of any number of ranks
    ending.py         finished, stopped, failed or hung: what is saved and recorded
    summary.py        summary.json and the closing line of a finished run
    blame.py          the samples of a step that has failed
    run_directory.py  the folder: claim it, status.json
    run_lock.py       its lock, for one job
    identity.py       whether a job may use the folder: empty, or with the same run in it; moves a run aside
    earlier_run.py    what is in the folder: a run or none, trained or not, its options
    node_records.py   what the nodes have recorded of a run: whether it goes on or starts over
    launch_token.py   whether a start is a restart of the same launch
    crash_loop.py     counts attempts in a row that finish no step
    manifest.py       one checkpoint: its manifest, and whether its files fit that
    checkpoint.py     Checkpoints: write (whole or not at all), load the newest whole one, keep the best
    chosen.py         --checkpoint last, best or a step
    weights.py        --init-from and `checkpoint export`: files of DDP, DataParallel, torch.compile, safetensors
    records.py        read status.json, metrics.jsonl and config.toml as they were written, or as they grow; the ledger
    verification.py   --verify-every: ranks compute each other's micro-batches again and compare digests
    verified_loss.py  its loss: what a rank's first micro-batch contributes, and the same computed again
    bit_flips.py      what `chaos --faults bitflip` plants
    fingerprint.py    what the bits depend on besides options: machine, libraries, code; for --strict-bits
    chain.py          the ledger of --digest-every: each record is chained to the one before
    predictions.py    --save-predictions
    tracking.py       metrics.jsonl, the lines on the screen, a log for each rank
    media.py          pictures, tables and numbers that a job logs itself
    trackers.py       other places for metrics: Weights & Biases, TensorBoard, a CSV file
    own_trackers.py   --tracker: a class of the user's, in a thread
    stragglers.py     ranks.jsonl, and the names of ranks that are late
    hints.py          options that would save time or memory, logged once
    compiled_code.py  stores compiled code of torch.compile with the run
    eval_only.py      --eval-only
    profiling.py      --profile: traces of some steps, and the facts that put them on one clock

What a run directory holds:

    config.toml       the options, usable as --config
    status.json       running, finished, stopped or failed; step, starts, host, and pid of what restarts rank 0; hints
    metrics.jsonl     a line for each event; a "start" record for each attempt
    ranks.jsonl       when each rank was ready for the reduction, with several ranks
    checkpoints/      step-N/state.pt (with --shard on state-R-of-W.pt) and manifest.json; set aside: damaged-*, wrong-*
    logs/             attempt-N/rank-R.log; after a hang stacks, and flight/ for torchfrtrace
    compiled/         with --compile
    profile/          with --profile: rank-R.json and operators.txt
    wandb/            with Weights & Biases; tensorboard/ and metrics.csv, if asked for
    trackers/         what a tracker of one's own was given, and its files
    predictions/      with --save-predictions, SET.json of each set
    summary.json      when it has finished, and model.pt, a bare state dict
    .lock             locked by the running rank 0

Not here: what a step computes and the state that is saved (training/), signals and hangs (resilience/), what the
commands print about a run (cli/).
"""
