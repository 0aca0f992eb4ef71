"""Manifests of KubeRay and scripts of Slurm, made of a plan: each of its device types becomes a worker group."""
