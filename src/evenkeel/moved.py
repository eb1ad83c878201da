"""Modules of version 0.1.0 under their old names, with a warning: `evenkeel.classify` is `evenkeel.tasks.classify`.

Only names that documents, a recorded `--task` or a queued Slurm job may hold. Delete this file, and its import in
`__init__`, in a project that has none of these.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

MOVED = {
    "agent": "launch.agent",
    "chaos": "cli.chaos",
    "classify": "tasks.classify",
    "container": "launch.docker.container",
    "heartbeat": "resilience.heartbeat",
    "models": "tasks.models",
    "optimization": "training.optimization",
    "plan": "data.plan",
    "randomness": "data.randomness",
    "regress": "tasks.regress",
    "segment": "tasks.segment",
    "slurm": "launch.slurm",
    "slurm.node": "launch.slurm.node",
}


class _Moved(Loader):
    """Finds the old names, and loads the module by its new one."""

    def __init__(self, new: str) -> None:
        self.new = new
        self.spec: ModuleSpec | None = None

    @classmethod
    def find_spec(cls, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        return ModuleSpec(name, cls(f"{package}.{MOVED[old]}")) if package == __package__ and old in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is now {self.new}; the old name will go", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # it has been executed under its new name

    def get_code(self, name: str) -> CodeType:
        """What `python -m NAME` runs."""
        return compile(f"import runpy; runpy.run_module({self.new!r}, None, '__main__', True)", name, "exec")


# First, because `slurm.node` would be found on the path of `slurm`, as another module.
sys.meta_path.insert(0, _Moved)
