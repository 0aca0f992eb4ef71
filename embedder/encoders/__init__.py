"""Encoders of queries: ONNX Runtime, torch, and models of other frameworks."""
