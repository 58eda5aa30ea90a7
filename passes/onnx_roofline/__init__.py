"""Roofline analysis of `.onnx` files, without a torch model: `program_of_onnx`."""

from __future__ import annotations

from optpass.passes.onnx_roofline.analysis import OnnxFacts, program_of_onnx

__all__ = ["OnnxFacts", "program_of_onnx"]
