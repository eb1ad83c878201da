"""Evenkeel: the parts of an elastic, exactly resumable distributed training job."""

__version__ = "0.1.0"
