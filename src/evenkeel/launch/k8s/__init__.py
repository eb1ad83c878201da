"""Kubernetes: submit a job as YAML through kubectl, and follow it.

    options.py     the options of k8s/submit.py
    submission.py  checks them, then `kubectl apply`
    manifest.py    the objects of a job: a Service and an Indexed Job, or a TrainJob of Kubeflow Trainer v2
    text.py        objects as YAML, and words that Kubernetes leaves as they are
    kubectl.py     calls kubectl; the log and the end of a job

Not here: process 1 of a pod, which is that of any container (`launch.docker.container`), and the health check
(`resilience.heartbeat`). Optional: delete this folder with k8s/, tests/launch/k8s and tests/k8s.
"""
