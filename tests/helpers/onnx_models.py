"""Models of layers for ONNX Runtime: their inputs, and whether they compute what a layer does."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tolerances import assert_close

import anycell
from anycell.onnx import export

Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of NumPy run step by step: kernels of so many cells would take long to compile."""
    layers = importlib.import_module("anycell.numpy.layers")
    if "fused" not in request.fixturenames:
        monkeypatch.setattr(layers, "plan", functools.partial(layers.plan, engine="reference"))


@pytest.fixture
def fused() -> None:
    """Layers of NumPy run by kernels."""


def run(model: Any, feeds: Arrays) -> list[Any]:
    """What ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers)
    return list(session.run(None, feeds))


def feeds_of(layer: Any, inputs: str, steps: int, rows: int, seed: int) -> tuple[Arrays, Arrays]:
    """Arguments of a call of a layer, and the inputs of its model."""
    readout, layer = getattr(layer, "readout", None), getattr(layer, "layer", layer)
    rng, first = np.random.default_rng(seed), bool(layer.batch_first)
    shape = (rows, steps) if first else (steps, rows)

    def real(*sizes: int) -> Any:
        return rng.normal(size=sizes).astype(layer.dtype)

    feeds: Arrays = {"x": real(*shape, layer.input_size)}
    call: Arrays = {}
    if readout is not None:
        call["forced"] = feeds["forced"] = rng.random(shape) < 0.5
        feeds["x"][~call["forced"], : readout.output_size] = np.nan
    for name in inputs.split():
        if name == "lengths":
            call[name] = feeds[name] = rng.integers(0, steps + 1, rows)
        elif name in ("mask", "resets"):
            call[name] = feeds[name] = rng.random(shape) < 0.6
        else:
            count = layer.num_layers * (1 + layer.bidirectional)
            sizes = [layer.sizes[state.size] for state in layer.cell.states]
            states = tuple(np.abs(real(count, rows, size)) + 1 for size in sizes)
            names = [f"{name}_{state}" for state in layer.cell.state_names]
            feeds |= zip(names, states, strict=True)
            call[name] = states if len(states) > 1 else states[0]
    if layer.cell.static:
        call["static"] = feeds["static"] = real(rows, layer.sizes[layer.cell.static_size])
    return call, feeds


Sizes = Sequence[tuple[int, int]]


def check_export(
    layer: Any, inputs: str = "", sizes: Sizes = ((7, 2), (1, 3)), **options: Any
) -> Any:
    """The model of a layer computes what the layer does, for several numbers of steps and rows."""
    model = export(layer, inputs=inputs, **options)
    onnx.checker.check_model(model, full_check=True)
    for seed, (steps, rows) in enumerate(sizes):
        call, feeds = feeds_of(layer, inputs, steps, rows, seed)
        output, final = layer(feeds["x"], **call, **options)
        for result, right in zip(run(model, feeds), [output, *tuples(final)], strict=True):
            assert_close(result, right, "float32", "runtime")
    return model


def tuples(states: Any) -> tuple[Any, ...]:
    return states if isinstance(states, tuple) else (states,)


def kinds(model: Any) -> set[str]:
    return {node.op_type for node in model.graph.node} & {"LSTM", "GRU", "RNN", "Scan"}


def numpy_layer(cell: Any, *sizes: Any, **options: Any) -> Any:
    options |= {"P": 5} if "P" in cell.declared_sizes else {}
    return anycell.numpy.RNN(cell, 3, 6, *sizes, initializer="torch", seed=1, **options)
