"""`python -m evenkeel chaos`: break a running job at random, start it again, and report what that cost."""
