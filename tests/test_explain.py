"""``anycell.explain``: what the page says, for every kind of cell."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from processes import python

import anycell
from anycell import cell, cells, keep, linear, sigmoid, tanh
from anycell.engines import cpu
from anycell.explanation import Explanation
from anycell.lang.expr import Expr, listing
from anycell.lang.grad import backward
from anycell.plan import plan


@cell(gates="f g", state="h:P c=-1", params="p_f=1", static="e")
def Odd(x, r, s, p, e, *, rate: float = 0.5):
    """A projection, a mask, a static input, a state of another size."""
    f = sigmoid(x.f + r.f + p.p_f * s.c)
    c = f * s.c + keep(rate) * tanh(x.g + r.g) + e
    return linear(c, "hr", bias=True), c


@cell(gates="t1 g", state="h")
def Undocumented(x, r, s):
    return sigmoid(x.t1) * s.h + tanh(x.g + r.g)


@cell(gates="g", state="h")
def NoMatmul(x, r, s):
    """Without a recurrent matmul."""
    return 0.9 * s.h + tanh(x.g)


CELLS = [
    *(getattr(cells, name) for name in cells.__all__),
    cells.GRU(reset_after=False),
    cells.RNN(nonlinearity="relu"),
    cells.PeepholeLSTM(coupled=True, cell_clip=3.0),
    Odd,
    Undocumented,
    NoMatmul,
]


def section(page: object, title: str) -> list[str]:
    """The lines under the heading that starts with ``title``."""
    lines = str(page).splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(title)]
    rest = lines[start + 1 :]
    end = next((i for i, line in enumerate(rest) if line and line[0] != " "), len(rest))
    return [line.strip() for line in rest[:end] if line.strip()]


@pytest.mark.parametrize("which", CELLS, ids=repr)
def test_every_cell_has_a_page(which: anycell.Cell) -> None:
    page = anycell.explain(which, hidden_size=32)
    text = str(page)
    assert text == repr(page)
    assert text.splitlines()[0] == f"{which!r}: hidden size 32, float32"
    assert max(map(len, text.splitlines())) <= 100
    assert page.plan is plan(which, 32)
    for state in which.state_names:
        assert f"    {state}' = " in text
    (why,) = section(page, f"engine: {page.plan.engine}")[:1]
    assert page.plan.reason.startswith(why)
    assert ("forward kernel" in text) is (page.plan.engine == "cpu")
    assert "linear_t" not in text and "Expr" not in text


def test_equations_of_the_lstm() -> None:
    page = anycell.explain(cells.LSTM)
    assert "Long short-term memory" in str(page).splitlines()[1]
    assert section(page, "forward, one step")[:6] == [
        "i = sigmoid(a.i)",
        "f = sigmoid(a.f)",
        "g = tanh(a.g)",
        "o = sigmoid(a.o)",
        "c' = f * s.c + i * g",
        "h' = o * tanh(c')",
    ]


def test_what_a_layer_learns_and_what_of_it_is_not_used() -> None:
    @cell(gates="f g k", state="h", params="w b", static="e")
    def Idle(x, r, s, p, e):
        return sigmoid(r.f) * s.h + tanh(x.g + p.b)

    lines = section(anycell.explain(Odd, 32, P=16), "forward, one step")
    assert "W_ih     [2 H, inputs]: [64, inputs]" in [re.sub(" {3,}", "     ", l) for l in lines]
    assert any(re.fullmatch(r"W_hh +\[2 H, P\]: \[64, 16\]", line) for line in lines)
    assert any(re.fullmatch(r"W_hr .*\[P, H\]: \[16, 32\], and a bias b_hr", l) for l in lines)
    (said,) = [
        l for l in section(anycell.explain(Idle), "forward, one") if l.startswith("not used")
    ]
    assert said.split(maxsplit=2)[2] == (
        "the gate k, the parameter w, the static input e: no new state depends on them"
    )
    idle = [which for which in CELLS if "not used" in str(anycell.explain(which))]
    assert idle == [cells.PeepholeLSTM(coupled=True, cell_clip=3.0)]  # whose gate i is 1 - f


def test_a_notebook_shows_sections() -> None:
    page = anycell.explain(cells.LSTM, 32, llvm=True)
    shown = page._repr_html_()
    assert shown.count("<details") == shown.count("</details>") > 5
    assert "<details open><summary>forward, one step</summary><pre>    i = sigmoid" in shown
    assert "<details><summary>llvm</summary><pre>" in shown and "d_h&#x27; = d_output" in shown
    assert "<details><summary>graphs</summary><svg" in shown
    assert anycell.numpy.LSTM(3, 8).explain()._repr_html_().count("runs on cpu") == 1


def test_a_misspelt_cell_is_near_to_others() -> None:
    with pytest.raises(AttributeError, match=r"'Peephole'\. Close to it: PeepholeLSTM"):
        cells.Peephole  # noqa: B018
    assert not hasattr(cells, "_something")


def test_backward_of_the_lstm() -> None:
    lines = section(anycell.explain(cells.LSTM), "backward, one step")
    assert "d_h' = d_output + (d_a.i, d_a.f, d_a.g, d_a.o) @ W_hh" in lines
    assert "d_c' = d_s.c" in lines
    assert "d_a.f = t2 * s.c * (f * (1 - f))" in lines
    assert "d_s.c = t2 * f" in lines


def test_what_is_kept_and_what_it_costs() -> None:
    page = anycell.explain(cells.LSTM, hidden_size=100, dtype="float64", batch=3)
    lines = section(page, "kept for the backward")
    assert lines[0].split() == ["o", "=", "sigmoid(a.o)", "800"]
    together = next(line for line in lines if line.startswith("together"))
    assert together.split()[1] == f"{page.plan.saved_bytes:,}" == "4,800"
    assert "of 3 rows" in next(line for line in lines if "14,400" in line)
    assert "computed again from these: tanh(c')" in lines
    assert "were they kept as well: 5,600" in lines


@pytest.mark.parametrize("which", CELLS, ids=repr)
def test_the_sum_is_that_of_the_plan(which: anycell.Cell) -> None:
    page = anycell.explain(which, hidden_size=8)
    together = next(s for s in section(page, "kept for") if s.startswith("together"))
    if any(s.size != "H" for s in which.states):  # the plan knows H alone
        assert together.endswith("4 P")
    else:
        assert together.split()[1] == f"{page.plan.saved_bytes:,}"


def test_sizes_besides_the_hidden_size() -> None:
    open_ = anycell.explain(cells.LSTMP, 64)
    assert "the size P of this cell is unknown" in str(open_) and "4 P" in str(open_)
    page = anycell.explain(cells.LSTMP, 64, P=32)
    assert page.plan is plan(cells.LSTMP, 64, sizes={"P": 32})
    assert "matmul [rows, 64] @ [64, 32]" in str(page) and "4 P" not in str(page)
    with pytest.raises(
        TypeError, match=r"Q: given 32; .*cell LSTMP declares only the sizes P besides H"
    ):
        anycell.explain(cells.LSTMP, 64, Q=32)
    with pytest.raises(ValueError, match="P: given 0; expected an int from 1"):
        anycell.explain(cells.LSTMP, 64, P=0)


def test_it_says_the_shape_of_each_weight() -> None:
    @cell(gates="a", state="h")
    def Narrow(x, r, s, *, size: str | None = None):
        return tanh(x.a + linear(tanh(linear(s.h, "down", size=size)), "up"))

    for page, down, up in [
        (anycell.explain(Narrow, 12), "[H, H]: [12, 12]", "[H, H]: [12, 12]"),
        (anycell.explain(Narrow(size="R"), 12, R=3), "[R, H]: [3, 12]", "[H, R]: [12, 3]"),
        (anycell.explain(Narrow(size="R"), 12), "[R, H]", "[H, R]"),
    ]:
        step = section(page, "forward, one step")
        assert f"W_down   the weight of linear(..., 'down'), {down}" in step
        assert f"W_up     the weight of linear(..., 'up'), {up}" in step
    blocks = str(anycell.explain(cells.sLSTM(heads=4), 12))
    assert "linear(..., 'r'), [4 H, H] of 4 blocks along its diagonal: [4, 12, 3]" in blocks


def test_layer_norm_reads_as_it_was_written() -> None:
    page = anycell.explain(cells.LayerNormLSTM)
    step = section(page, "forward, one step")
    gate = "i = sigmoid(p.x_i * layer_norm(x.i, eps) + p.r_i * layer_norm(r.i, eps) + p.b_i)"
    assert gate in step
    assert "h' = o * tanh(p.c_gain * layer_norm(c', eps) + p.c_shift)" in step
    assert len([line for line in step if " = " in line]) == 6
    said = r"makes \d passes over the units of a row: \d+ reductions need all of them"
    assert re.search(said, str(page))
    clipped = section(anycell.explain(cells.PeepholeLSTM(cell_clip=3.0)), "forward, one step")
    assert "c' = clip(f * s.c + i * g, -cell_clip, cell_clip)" in clipped
    assert any(re.fullmatch(r"cell_clip +3\.0, a run-time value", line) for line in clipped)


def test_a_cell_that_the_fused_engine_refuses() -> None:
    page = anycell.explain(Odd, llvm=True, assembly=True)
    assert page.plan.engine == "reference"
    assert page.llvm is None and page.assembly is None
    assert "the size P of this cell is unknown" in section(page, "engine: reference")[0]
    assert "none: the reference engine" in section(page, "llvm")[0]
    back = section(page, "backward, one step")
    assert any("@ W_hr" in line for line in back)
    assert "d_W_hr += d_hr.T @ c'    d_b_hr += its rows" in back
    step = section(page, "forward, one step")
    assert "h' = linear(c', 'hr')" in step
    assert "c' = f * s.c + keep_0(rate) * g + e" in step
    assert any("initial values c: -1" in line for line in step)
    with pytest.raises(ValueError, match="engine='cpu' cannot run cell Odd"):
        anycell.explain(Odd, engine="cpu")


def test_a_gate_never_takes_a_name_that_is_taken() -> None:
    step = section(anycell.explain(Undocumented), "forward, one step")
    assert "h' = sigmoid(x.t1) * s.h + g" in step


def test_llvm_and_assembly_on_request() -> None:
    plain = anycell.explain(cells.RNN, hidden_size=16)
    assert "define" not in str(plain)
    assert "define" in plain.llvm and plain.llvm.count("; ---- ") == 2
    page = anycell.explain(cells.RNN, hidden_size=16, backward=False, llvm=True, assembly=True)
    assert page.llvm in str(page) + "\n"
    assert page.llvm.count("; ---- ") == 1
    assert ".globl\tdoor" in page.assembly and ".globl\tdoor" in str(page)
    assert "backward, one step" not in str(page) and "backward kernel" not in str(page)


def test_it_says_whether_the_kernel_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYCELL_CACHE_DIR", str(tmp_path / "cache"))
    before = section(anycell.explain(NoMatmul, hidden_size=24), "forward kernel")
    assert before[-1].startswith("not compiled yet; LLVM text of")
    cpu.compiled(plan(NoMatmul, 24))
    after = section(anycell.explain(NoMatmul, hidden_size=24), "forward kernel")
    assert re.fullmatch(r"[\d,]+ bytes of instructions, loaded, compiled here", after[-1])
    assert "no recurrent matmul" in after


def test_the_plain_page_compiles_nothing_and_writes_nothing(tmp_path: Path) -> None:
    code = """
        import anycell
        from anycell.engines.cpu import jit
        jit.compile = None
        print(anycell.explain(anycell.cells.LSTM, 64))
    """
    text = python(code, ANYCELL_CACHE_DIR=str(tmp_path / "cache"))
    assert "not compiled yet" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"cell": "LSTM"}, TypeError, "cell: given str 'LSTM'; expected a cell"),
        ({"hidden_size": 0}, ValueError, "hidden_size: given 0"),
        ({"hidden_size": 2.0}, TypeError, "hidden_size: given float 2.0"),
        ({"batch": -1}, ValueError, "batch: given -1"),
        ({"dtype": "float8"}, ValueError, "dtype: given 'float8'; expected one of"),
        ({"engine": "tpu"}, ValueError, "engine: given 'tpu'; expected 'cpu'"),
    ],
)
def test_refusals(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        anycell.explain(**{"cell": cells.LSTM, **arguments})


# ---- printing expressions ----------------------------------------------------------------------
def leaf(name: str) -> Expr:
    return Expr("param", (), (name,))


def test_listing_names_what_is_shared() -> None:
    a, b = leaf("a"), leaf("b")
    shared = a + b
    assert list(listing([("y", shared * shared)])) == ["t1 = p.a + p.b", "y = t1 * t1"]
    assert list(listing([("y", shared), ("z", -shared)])) == ["y = p.a + p.b", "z = -y"]
    assert list(listing([("y", a), ("z", a)])) == ["y = p.a", "z = p.a"]


def test_listing_keeps_lines_short() -> None:
    value = leaf("a0")
    for i in range(1, 60):
        value = tanh(value) * leaf(f"a{i}")
    lines = list(listing([("y", value)], width=40))
    assert len(lines) > 10 and max(map(len, lines)) < 50


def test_listing_stops_at_what_is_known() -> None:
    inner = tanh(leaf("a"))
    lines = list(listing([("y", inner * inner + 1.0), ("z", inner)], {inner: "known"}))
    assert lines == ["y = known * known + 1", "z = known"]


def test_printed_gradients_are_python() -> None:
    for which in CELLS:
        derived = backward(which)
        named = [(f"x_{gate}", e) for gate, e in derived.x.items()]
        for line in listing(named):
            compile(line, "listing", "exec")


def test_graphs_of_a_cell() -> None:
    """One picture that stands alone: both graphs, or the step's; of layers too."""
    page = anycell.explain(cells.PeepholeLSTM, 8)
    root = ElementTree.fromstring(page.svg())
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "A step of PeepholeLSTM" in texts
    assert "The backward pass of a step of PeepholeLSTM" in texts
    assert {"p.p_i", "s.c", "c'", "d_p.p_i"} <= set(texts)
    assert "d_p.p_i" not in anycell.explain(cells.PeepholeLSTM, 8, backward=False).svg()
    assert anycell.numpy.PeepholeLSTM(3, 8).explain().svg() == page.svg()


def test_graphs_of_constants() -> None:
    @cell(gates="a")
    def Always(x, r, s):  # type: ignore[no-untyped-def]
        return 1.0

    assert ElementTree.fromstring(anycell.explain(Always, 8).svg()).tag.endswith("svg")


def test_a_layer_without_a_cell_has_no_graph() -> None:
    page = Explanation(None, None, True, "a layer runs on torch (why)")
    with pytest.raises(ValueError, match=r"svg: given a layer .*expected a cell.*Pass the cell"):
        page.svg()
    assert "graphs" not in page._repr_html_()
