"""Manifests of KubeRay and scripts of Slurm, made from a plan: each of its device types becomes a worker group."""
