"""``anycell.onnx.export`` of ``Feedback``."""

from typing import Any

import pytest
from tolerances import assert_close

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx_models import check_export, feeds_of, kinds, numpy_layer, quick, run  # noqa: F401

import anycell
from anycell import cells
from anycell.lang import ops
from anycell.onnx import export


@anycell.cell(gates="i o", state="h m", params="p")
def twice(x: Any, r: Any, s: Any, p: Any) -> Any:
    """Two layers in one cell, the second of which is the first state."""
    m = 0.5 * s.m + ops.tanh(x.i + p.p * s.m + r.i)
    return ops.tanh(anycell.linear(ops.relu(m), "second") + x.o + r.o), m


def fed(cell: Any, width: int = 2, bias: bool = True, **options: Any) -> Any:
    layer = numpy_layer(cell, **options)
    size = layer.sizes[layer.cell.states[0].size]
    readout = anycell.numpy.Dense(size, width, bias=bias, seed=2, dtype=layer.dtype)
    return anycell.numpy.Feedback(layer, readout)


def check_feedback(feedback: Any, inputs: str = "") -> None:
    model = check_export(feedback, inputs, [(7, 2), (1, 3), (40, 1)])
    assert kinds(model) == {"Scan"}
    wanted = {"x", "forced", *(name for name in inputs.split() if name != "state")}
    assert {i.name for i in model.graph.input if i.name[:6] not in ("state_", "static")} == wanted


def test_feedback() -> None:
    """A cell of ours and one of a user's, with all that a call takes."""
    check_feedback(fed(cells.LSTM))
    check_feedback(fed(cells.GRU, 3, batch_first=True), "state lengths mask resets")
    check_feedback(fed(twice, 1, bias=False), "resets")
    exact = fed(twice, dtype="float64")
    call, feeds = feeds_of(exact, "", 5, 2, 0)
    (result, *_), (right, _) = run(export(exact), feeds), exact(feeds["x"], **call)
    assert_close(result, right, "float64", "forward")


@pytest.mark.slow
@pytest.mark.parametrize("name", cells.__all__)
def test_feedback_of_every_cell(name: str) -> None:
    check_feedback(fed(getattr(cells, name)))
    check_feedback(fed(getattr(cells, name), batch_first=True), "state lengths resets")


def test_what_a_feedback_has_not() -> None:
    feedback = fed(cells.GRU)
    for arguments, error, message in (
        ({"inputs": "reset_state"}, ValueError, "expected names among .*, resets, forced. Leave"),
        ({"forced": 0.5}, TypeError, "forced: given float 0.5; expected no such argument"),
        ({"masked_output": "repeat"}, TypeError, "masked_output: given str 'repeat'; expected no"),
    ):
        with pytest.raises(error, match=message):
            export(feedback, **arguments)
    with pytest.raises(ValueError, match="inputs: given 'forced'; expected names among state"):
        export(feedback.layer, inputs="forced")
    small = anycell.numpy.Feedback(anycell.compress.quantize(feedback.layer), feedback.readout)
    with pytest.raises(ValueError, match=r"weights of 8 bits; expected real numbers\. Export"):
        export(small)
