"""The same job on a cluster: submit once, come back to a finished model."""
