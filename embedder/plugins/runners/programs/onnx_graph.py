"""Program of the kind `onnx`: a session of ONNX Runtime; Python 3.9."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from .tensors import graph_inputs, in_pieces, join_outputs

TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
"""Variable that stops ONNX Runtime from keeping an id of this device and sending events to its maker."""
ERRORS_ONLY = 3  # severity of ONNX Runtime's log


class OnnxGraph:
    """Session of one graph."""

    least = 1
    most: int | None = None

    def __init__(self, path: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self.path, self.inputs, self.outputs = path, inputs, outputs

    def load(self, device: str, num_threads: int) -> None:
        """Open the session; ValueError if the graph lacks an input or output, or the device can't be used here."""
        os.environ[TELEMETRY_OFF] = "1"  # read when the library is imported
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = ERRORS_ONLY
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting threads take no CPU
        providers: list[Any] = ["CPUExecutionProvider"]
        if device.startswith("cuda"):
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise ValueError(f"device {device}: ONNX Runtime here is the one for CPUs; install onnxruntime-gpu")
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": int(device.partition(":")[2] or 0)}))
        self.session = onnxruntime.InferenceSession(self.path, options, providers=providers)
        self._check_names()

    def _check_names(self) -> None:
        masks = [each["mask"] for each in self.inputs.values() if each.get("mask")]
        sides = {
            "inputs": ([*self.inputs, *masks], [each.name for each in self.session.get_inputs()]),
            "outputs": ([*self.outputs], [each.name for each in self.session.get_outputs()]),
        }
        for side, (declared, found) in sides.items():
            unknown = [name for name in declared if name not in found]
            missing = [name for name in found if name not in declared] if side == "inputs" else []
            if unknown or missing:
                raise ValueError(f"its {side} are {', '.join(found)}, and declared are {', '.join(declared)}")
        first = self.session.get_inputs()[0].shape[:1]
        if first and isinstance(first[0], int):
            self.least = self.most = first[0]

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Run the graph."""
        found = []
        for count, arrays in in_pieces(graph_inputs(batch, self.inputs), self.least, self.most):
            values = self.session.run(list(self.outputs), arrays)
            found.append({name: value[:count] for name, value in zip(self.outputs, values)})  # noqa: B905 (Python 3.9)
        return join_outputs(found, self.outputs)
