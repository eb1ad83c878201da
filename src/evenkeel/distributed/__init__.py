"""Processes, devices and reductions.

- `world`: `World`, this process's rank and device from torchrun's environment; the process group; small collectives.
- `rendezvous`: how restarted workers agree on a store namespace that no earlier attempt has used.
- `refusals`: a node that refuses its input makes the others refuse as well.
- `devices`: GPUs by torch's number and the machine's; refusals if GPUs are missing.
- `exits`: from an exception to an exit code and one line on stderr.
- `causes`: what an error means: a mistake in code, a machine's fault, or the loss of another rank.
- `attempt_files`: which rank of a node failed first, and what torchrun will report.
- `tree`: the binary tree over micro-batch ids in which `--reduce tree` adds.
- `reduction`: the stock `AllReduce`, and `TreeReduction`, the same bits on any number of ranks; both are DDP hooks.
- `sharded_reduction`: with `--shard on`, FSDP2's reduce-scatter in the order of the tree.
- `exchange`: how ranks exchange their sums for `TreeReduction`, in a thread beside the backward pass.
- `data_parallel`: all of `--strategy dp`, `nn.DataParallel`.
- `placement`: `--place` and `--model-parallel`, a model on several devices of one process.
- `sync_batchnorm`: `--sync-batchnorm`, BatchNorm over the global batch on CPUs and GPUs.
- `collectives`: refuses collectives in a task unless the task allows them.
- `transfer`: copies batches to the GPU while it computes.

Not here: the step itself, which wraps the model in DDP (`training/distributed_loss.py`), signals, hangs and dead peers
(`resilience/`), and starting the processes (`launch/`).
"""
