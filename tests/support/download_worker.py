"""python download_worker.py DATASET FOLDER, or: python download_worker.py MODEL, or for a control: stock FOLDER

Makes the data set or the pretrained network, downloading it if need be, and prints a digest of it.
"""

import hashlib
import sys
from pathlib import Path

import torchvision

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evenkeel.distributed.exits import exit_code
from evenkeel.training.state_dicts import sha256
from tests.support.small_task import Small


def main() -> int:
    if sys.argv[1] == "stock":
        torchvision.datasets.MNIST(sys.argv[2], download=True)
    elif len(sys.argv) == 3:
        name = sys.argv[1]
        task = Small(dataset=name, data_dir=Path(sys.argv[2]))
        parts = [task.train_dataset(), task.test_dataset()]
        tensors = [tensor for part in parts for tensor in part.tensors]
        print(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest())
    else:
        weights = Small(model_=sys.argv[1], pretrained=True, image_size=64).model().state_dict()
        print(sha256({name: tensor for name, tensor in weights.items() if not name.startswith("classifier.1")}))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
