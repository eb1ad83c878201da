"""What a refusal says, and a job that refuses."""

from evenkeel.tasks.registry import built_in

NONSENSE = (
    f"evenkeel: --task nonsense: unknown; built in: {', '.join(built_in())}; your own: FILE.py:CLASS or "
    "PACKAGE.MODULE:CLASS\n"
)

REFUSER = """
import os, sys, time
from pathlib import Path
from evenkeel.common.errors import Refusal
from evenkeel.distributed import exits

def main():
    (Path(os.environ["OUT"]) / f"{os.environ['RANK']}-{os.getpid()}").touch()
    if os.environ["RANK"] in sys.argv[1]:
        raise Refusal("no")
    time.sleep(120)

exits.SPEAKER_TIMEOUT = 1
exits.leave(exits.exit_code(main))
"""
