"""The built-in tasks; finding a task of yours; the command line of train.py.

- `command_line.py`  the options of train.py and of the task, from the command line and --config
- `registry.py`      from --task to a class: one of these, or yours in a file or package
- `classify.py`      the task `classify`: images of a data set by name, by a network by name
- `datasets.py`, `decoding.py`, `downloads.py`, `augmentation.py`, `models.py`   its data, transforms and networks
- `segment.py`       the task `segment`: two networks in one step, the pattern for several networks
- `regress.py`       the task `regress`: a linear model on random data
- `lm.py`            the task `lm`: a language model; `text.py` has its data
- `transformer.py`   the network of `lm`, which tests of --shard divide
- `digits.py`        the data that comes with Evenkeel, for `classify` and `segment`

To add a task, write a subclass of `Task` (training/task.py) in any file: `--task FILE.py:CLASS`; docs/tasks.md says
how. To give it a name of its own, add a module here and a line to `BUILT_IN` in registry.py.

To delete one, delete its module, `tests/tasks/test_NAME.py` and `tests/processes/test_NAME.py`. With `classify` go its
five modules and their tests; then set another default of --task in config/. With `lm` go its two, the text in assets/
and cli/sample.py. Everything else stays, and --task says in one line what has been deleted. Nothing outside this folder
imports a built-in task, but tests of other components use `classify` and `segment` as examples.
"""

from ..data.dataset import InMemory
from ..data.order import balanced, buckets
from ..data.shards import Shards
from ..data.streams import Streams
from ..training.classification import Classification
from ..training.sum_metrics import SumMetrics
from ..training.task import Task, constants, secret
from .digits import digits

__all__ = [
    "Classification", "InMemory", "Shards", "Streams", "SumMetrics", "Task", "balanced", "buckets", "constants",
    "digits", "secret",
]  # fmt: skip
