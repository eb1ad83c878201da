"""Which sample goes where, and loading it.

- `plan`: an epoch cut into steps, a step into micro-batches, micro-batches given to ranks; integers only.
- `shuffle`: the sample at a position of an epoch's order, computed without storing the order.
- `blocks`: the same for samples in files, read in long runs: blocks are permuted, then samples within windows.
- `order`: the task's own order: drawn by weights, or listed for each epoch.
- `token_batches`: micro-batches of similar lengths, with a bounded number of tokens.
- `sampler`: `ElasticSampler`, this rank's micro-batches from any step of any epoch, and `by_step`.
- `randomness`: seeds as pure functions of (run seed, purpose, place), and seeding the generators.
- `dataset`: in-memory and limited data sets, those with a task's own collate, and fetching by one index operation.
- `shards`: `Shards`, a folder of tar, JSON lines, Parquet or MDS files; `shard_index`, the index of these files;
  `shard_formats`, the offsets of samples in a file.
- `streams`: `Streams`, data that can only be read in order, as numbered samples; `substream`: an open substream.
- `loader`: a `DataLoader` whose samples have their own random numbers, in this process or in workers.
- `batch`: batches of any structure: collated, moved to a device; why samples do not collate.
- `data_digest`: a few samples of each set, read before the training, compared among ranks and with earlier starts.
- `changes`: the same samples read again while the job runs, because a data set must not change.

Not here: the built-in data sets, downloads and augmentation (`tasks/`), the choice of the micro-batch (`training/`),
whatever needs a process group (`distributed/`).
"""
