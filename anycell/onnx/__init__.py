"""Layers from nodes of ONNX models, and ONNX models of layers."""

from anycell.requirement import require

require("onnx", "anycell.onnx", "onnx")

from anycell.onnx.export import export
from anycell.onnx.nodes import load
from anycell.refusal import missing

__all__ = ["export", "load"]
__getattr__ = missing(__name__, __all__)
