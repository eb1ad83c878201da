"""What one step is: the gradient of a global batch, and the committed state that it changes.

A step adds up the gradients of this rank's micro-batches, reduces them over the ranks, clips them, sets the learning
rates and commits: the optimizers step on all ranks, or all ranks skip a step that is not finite. Only a commit
changes the state, so between two commits another thread may copy it at any time.

- task: model, loss and metrics; the class that a user writes. task_data: its data, and how a run prepares it.
  task_training: its optimizers, and its own state. classification: the task of inputs with a label each
- loss: the loss and the model in one module, which DDP wraps
- distributed_loss: forward and backward passes of a step, and DDP around them; step_sums: what they add up
- whole_batch: losses over all samples of a step, in the memory of one micro-batch; whole_batch_evaluation: their
  evaluation
- state: model, optimizers and step, committed and captured as one
- arrivals: when each rank is ready for the reduction, and in which part of the step it spends its time
- balance: how many micro-batches each rank computes, by its speed (--shares)
- digest: 64 bits for each tensor, to compare the bits of two runs, or of two moments
- side_effects: weights and numbers that a loss changes, which it must not; a loss or metric that is a sum
- sharding, row_norm: --shard on, and the norm of a gradient whose rows are on different ranks
- memory_parts: how many bytes of a rank's memory each part of the state takes
- meta_device: a model that has no memory until rank 0 sends its weights then
- state_dicts: weights for a file; file_memory: memory on the disk for those that one process has no room for
- seqlock, staging: whether a copy of the state is consistent, and the memory that it is copied into
- replica: a copy of a sharded rank's last steps, on another node
- slots: the last two steps of a sharded rank, in memory that outlives it
- buffers: BatchNorm's statistics, updated by all micro-batches of a step
- optimization: --optimizer, --schedule, and loading an optimizer's state
- schedulers: a task's torch schedulers, as a part of the state; task_state: other state of a task
- refresh: training data that the model makes
- recomputation: --checkpoint-activations
- precision: autocast, and float16's loss scaling
- nonfinite: steps that are skipped on the device
- ema, early_stopping, freezing: --ema, --patience, --freeze
- evaluation: the metrics over every test sample once
- sum_metrics: torchmetrics' objects in an evaluation
- prediction: a task's predictions for all samples, in order
- checks: mistakes in tasks, each reported in one line
- cut: into how many micro-batches a step is cut, and which cuts BatchNorm cannot train on
- batch_size_finder: --micro-batch auto
- oom: out-of-memory errors explained
- determinism: --deterministic, and the threads of a rank
- flops: operations and tokens per sample, for MFU and tokens/s
- compilation: --compile

Not here: which sample goes where (data), how ranks exchange gradients (distributed), files and resuming (run), signals
and hangs (resilience), the built-in tasks (tasks).
"""
