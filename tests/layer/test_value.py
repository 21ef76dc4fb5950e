"""A layer as a value: equal, hashable, and written to and read from JSON."""

import json
from typing import Any

import pytest

from anycell import Cell, cell, cells, keep
from anycell.plan import Layer, Options
from anycell.plan.layer import CELLS, name_of, register

OPTIONS = Options((False, True), "repeat", training=True, seed=2**64 - 1, checkpoint="sqrt")
LAYERS = {
    "plain": Layer(cells.LSTM, (("H", 5),), dtype="float32", arrays=("x", "weight_ih", "mask")),
    "sizes": Layer(cells.LSTMP, (("P", 3), ("H", 5)), OPTIONS),
    "hyper": Layer(cells.ZoneoutLSTM(zoneout_h=0.25), (("H", 5),)),
    "wishes": Layer(cells.LSTM, (("H", 5),), sequences=("c",), unroll=True, engine="cpu"),
    "states": Layer(cells.GRU, (("H", 5),), outputs=False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_json(name: str) -> None:
    layer = LAYERS[name]
    again = Layer.read(layer.text())
    assert dict(again.sizes) == dict(layer.sizes)
    assert again._replace(sizes=layer.sizes) == layer
    assert again.cell.hyper == layer.cell.hyper
    assert {layer: 1}[again._replace(sizes=layer.sizes)] == 1


def test_a_text_without_hyperparameters_is_the_same_for_all_of_them() -> None:
    """So that a schedule makes no new graphs: then the cell that was registered is read."""
    layer = LAYERS["hyper"]
    other = layer._replace(cell=cells.ZoneoutLSTM(zoneout_h=0.5))
    assert other.text() != layer.text() and other.text(hyper=False) == layer.text(hyper=False)
    name = register(layer.cell)
    assert Layer.read(layer.text(hyper=False)).cell is CELLS[name]


def test_graphs_of_earlier_versions() -> None:
    """These are the fields of a text in their order, as in programs that were exported before."""
    fields = json.loads(LAYERS["sizes"].text())
    assert list(fields) == ["cell", "hidden_size", "sizes", "dtype", "options", "arrays"]
    assert fields["hidden_size"] == 5 and fields["sizes"] == [["P", 3]]
    assert fields["cell"] == name_of("LSTMP", cells.LSTMP.key)


def altered(**fields: Any) -> str:
    return json.dumps({**json.loads(LAYERS["plain"].text()), **fields})


@pytest.mark.parametrize(
    "text",
    [
        "", "3", "[]", "{}", altered(further=1), altered(sizes=[["P"]]), altered(sizes=3),
        altered(options={}), altered(options={"reverse": [False]}), altered(outputs=True),
        altered(hyper={}), LAYERS["plain"].text() + " ",
    ],
)  # fmt: skip
def test_other_texts(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Layer.read(text)


def test_a_cell_that_is_not_known() -> None:
    @cell(gates="a", state="h")
    def Unheard(x: Any, r: Any, s: Any) -> Any:
        return keep(0.5) * x.a

    assert isinstance(Unheard, Cell)
    layer = Layer(Unheard, (("H", 5),))
    text = layer.text()
    assert Layer.read(text) == layer
    del CELLS[name_of(Unheard.name, Unheard.key)]
    with pytest.raises(RuntimeError, match=r"cell Unheard-\w+ of this graph is not known.*Import"):
        Layer.read(text)


def test_sizes() -> None:
    """One unit has a symbol too, which nobody has to give a number."""
    layer = Layer(cells.LSTM, (("H", 8), ("P", 3)))
    assert [layer.size(symbol) for symbol in ("H", "P", "1")] == [8, 3, 1]
