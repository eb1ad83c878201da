"""Networks."""

from __future__ import annotations

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer for small one-channel images.

    Args:
        classes: number of outputs.
        width: channels of the first convolution; the second has twice as many.
        dropout: probability of dropping a feature before the last layer.

    Shape:
        [n, 1, 8, 8] -> [n, classes], unnormalised log-probabilities.
    """

    def __init__(self, classes: int, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.classifier = nn.Linear(2 * width * 4 * 4, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.classifier(self.features(images))  # type: ignore[no-any-return]
