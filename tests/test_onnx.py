"""``anycell.onnx``: nodes as layers, layers as nodes and scans, and both together."""

import copy
import importlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import python
from random_cells import random_cell
from tolerances import assert_close

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_models import (  # noqa: E402
    Arrays,
    check_export,
    feeds_of,
    fused,  # noqa: F401
    kinds,
    numpy_layer,
    quick,  # noqa: F401
    run,
    tuples,
)

import anycell  # noqa: E402
from anycell import cells  # noqa: E402
from anycell.lang.ops import TABLE  # noqa: E402
from anycell.onnx import export, load  # noqa: E402
from anycell.onnx.cells import FUNCTIONS, Form, form_of  # noqa: E402
from anycell.onnx.scan import MADE, OPERATORS  # noqa: E402

OPS = {"LSTM": 4, "GRU": 3, "RNN": 1}  # and their numbers of gates
CALL = "X", "sequence_lens", "initial_h", "initial_c"


def model_of(op: str, arrays: Arrays, opset: int = 22, name: str = "it", **attributes: Any) -> Any:
    """A model of one node, whose weights are constants."""
    names = "X W R B sequence_lens initial_h initial_c P".split()[: 8 if op == "LSTM" else 6]
    results = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    units = arrays["R"].shape[-1] if np.ndim(arrays["R"]) else 1
    attributes = {"hidden_size": units, **attributes}
    given = [n if n in arrays else "" for n in names]
    node = helper.make_node(op, given, results, name=name, **attributes)
    kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in arrays.items()}
    inputs = [
        helper.make_tensor_value_info(n, kinds[n], arrays[n].shape) for n in CALL if n in arrays
    ]
    outputs = [
        helper.make_tensor_value_info(n, kinds["X"], [None] * (4 - (n != "Y"))) for n in results
    ]
    constants = [numpy_helper.from_array(a, n) for n, a in arrays.items() if n not in CALL]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10 if opset > 21 else 8)


def called(arrays: Arrays) -> Arrays:
    return {n: arrays[n] for n in CALL if n in arrays}


def some(op: str, seed: int = 0, directions: int = 1, dtype: str = "float32") -> Arrays:
    """Arrays of a small node."""
    rng, gates, units = np.random.default_rng(seed), OPS[op], 6
    shapes: dict[str, tuple[int, ...]] = {
        "X": (5, 3, 4), "W": (directions, gates * units, 4),
        "R": (directions, gates * units, units), "B": (directions, 2 * gates * units),
        "initial_h": (directions, 3, units),
    }  # fmt: skip
    if op == "LSTM":
        shapes |= {"initial_c": shapes["initial_h"], "P": (directions, 3 * units)}
    arrays: Arrays = {n: (0.5 * rng.normal(size=s)).astype(dtype) for n, s in shapes.items()}
    return arrays | {"sequence_lens": np.array([5, 1, 3], np.int32)}


# -- nodes -----------------------------------------------------------------------------------------
def cases(op: str) -> list[Any]:
    node = importlib.import_module("onnx.backend.test.case.node")  # collects what is imported
    importlib.import_module(f"{node.__name__}.{op.lower()}")
    return [case for case in node._NodeTestCases if case.model.graph.node[0].op_type == op]


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", OPS)
def test_onnx_tests_of_nodes(op: str, framework: str) -> None:
    """ONNX's own: all of them, and nothing else than our layers computes them."""
    torch = pytest.importorskip("torch") if framework == "torch" else None
    count = 0
    for case in cases(op):
        for inputs, outputs in case.data_sets:
            (node,) = case.model.graph.node
            arrays = dict(zip([name for name in node.input if name], inputs, strict=True))
            model = onnx.ModelProto()
            model.CopyFrom(case.model)
            kept = [i for i in model.graph.input if i.name in CALL]
            del model.graph.input[:]
            model.graph.input.extend(kept)
            constants = [numpy_helper.from_array(a, n) for n, a in arrays.items() if n not in CALL]
            model.graph.initializer.extend(constants)
            program, call = load(model, framework), called(arrays)
            assert len(program.parts) == 1 and len(program.plan.steps) == 1
            if torch is not None:
                call = {name: torch.from_numpy(a) for name, a in call.items()}
            results = program(**call)
            results = results if isinstance(results, tuple) else (results,)
            for result, right in zip(results, outputs, strict=True):
                result = result if torch is None else result.detach().numpy()
                assert_close(result, right, "float32", "runtime")
            count += 1
    assert count >= 6


BOUNDED = ["HardSigmoid", "ScaledTanh", "Sigmoid", "Softsign", "Tanh"]


def random_node(seed: int) -> tuple[str, Arrays, Arrays]:
    """Op, arrays and attributes of a node that ONNX Runtime runs."""
    rng = random.Random(seed)
    op, direction = rng.choice([*OPS]), rng.choice(["forward", "reverse", "bidirectional"])
    directions = 1 + (direction == "bidirectional")
    arrays = some(op, seed, directions)
    for name in ("B", "sequence_lens", "initial_h", "initial_c", "P"):
        if rng.random() < 0.4:
            arrays.pop(name, None)
    attributes: Arrays = {"direction": direction}
    if rng.random() < 0.4:
        attributes["clip"] = rng.uniform(0.1, 1.0)
    if rng.random() < 0.7:
        count = {"LSTM": 3, "GRU": 2, "RNN": 1}[op]
        tame = BOUNDED if op != "RNN" and "clip" not in attributes else [*FUNCTIONS]
        chosen = []  # with gates and states that are not bounded, numbers would explode
        for _ in range(directions):
            chosen += [rng.choice(tame), *rng.choices([*FUNCTIONS], k=count - 1)]
        functions = [FUNCTIONS[name] for name in chosen]
        alphas = [rng.uniform(0.2, 0.8) for f in functions if f.alpha is not ...]
        betas = [rng.uniform(0.2, 0.8) for f in functions if f.beta is not ...]
        attributes |= {
            "activations": [n if op == "RNN" else rng.choice([n, n.lower()]) for n in chosen]
        }
        attributes |= {"activation_alpha": alphas} if alphas else {}
        attributes |= {"activation_beta": betas} if betas else {}
    flag = {"LSTM": "input_forget", "GRU": "linear_before_reset"}.get(op)
    if flag and rng.random() < 0.5:
        attributes[flag] = rng.randint(0, 1)
    return op, arrays, attributes


def check_random(seeds: range) -> None:
    for seed in seeds:
        op, arrays, attributes = random_node(seed)
        model = model_of(op, arrays, 7 + seed % 16, **attributes)  # of each opset from 7 to 22
        want = run(model, called(arrays))
        program = load(model, "numpy")
        for result, right in zip(program["it"](**called(arrays)), want, strict=True):
            assert_close(result, right, "float32", "runtime", axes=())
        batches = {n: a if a.ndim == 1 else a.swapaxes(0, 1) for n, a in called(arrays).items()}
        other = load(model_of(op, arrays, layout=1, **attributes), "numpy")
        for k, (result, right) in enumerate(zip(other["it"](**batches), want, strict=True)):
            right = right.transpose(1, 0, 2) if k else right.transpose(2, 0, 1, 3)
            assert_close(result, right, "float32", "runtime", axes=())


def test_random_nodes() -> None:
    check_random(range(40))


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
def test_random_nodes_fused() -> None:
    check_random(range(40, 50))


@pytest.mark.slow
def test_more_random_nodes() -> None:
    check_random(range(100, 600))


def by_onnx(model: Any, arrays: Arrays) -> list[Any]:
    """What ONNX's own evaluator computes. It ignores lengths, activations, ``clip``."""
    return list(ReferenceEvaluator(model).run(None, called(arrays)))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", OPS)
def test_what_onnx_runtime_refuses(op: str, direction: str) -> None:
    """Batches first, in float64."""
    arrays = some(op, 7, 1 + (direction == "bidirectional"), "float64")
    del arrays["sequence_lens"]
    for name in called(arrays):
        arrays[name] = arrays[name].swapaxes(0, 1)
    model = model_of(op, arrays, layout=1, direction=direction)
    with pytest.raises(Exception, match=r"layout == 1|double|NOT_IMPLEMENTED"):
        run(model, called(arrays))
    results = load(model, "numpy")["it"](**called(arrays))
    for result, right in zip(results, by_onnx(model, arrays), strict=True):
        assert_close(result, right, "float64", "forward")


def test_what_onnx_runtime_computes_otherwise() -> None:
    """A row of no steps keeps its state; ThresholdedRelu's threshold is 1."""
    arrays = some("RNN")
    arrays["sequence_lens"] = np.array([0, 5, 5], np.int32)
    model = model_of("RNN", arrays)
    _, h = load(model, "numpy")["it"](**called(arrays))
    assert np.array_equal(h[:, 0], arrays["initial_h"][:, 0])
    assert not run(model, called(arrays))[1][:, 0].any()
    arrays = some("RNN") | {"R": np.zeros((1, 6, 6), np.float32)}
    arrays["X"] *= 5
    model = model_of("RNN", arrays, activations=["ThresholdedRelu"])
    a = arrays["X"] @ arrays["W"][0].T + sum(np.split(arrays["B"][0], 2))
    arrays.pop("sequence_lens")
    (result, _), (other, _) = (
        load(model, "numpy")["it"](arrays["X"]),
        run(model, called(some("RNN"))),
    )
    assert_close(result[:, 0], np.where(a >= 1, a, 0), "float32", "forward")
    assert other.shape == result.shape


def test_weights_become_those_of_a_cell_of_ours() -> None:
    """One of ``anycell.cells`` where one fits."""
    usual = load(model_of("LSTM", some("LSTM")), "numpy")["it"][0]
    assert usual.cell is cells.PeepholeLSTM and {"p_i_l0", "bias_hh_l0"} < {*usual.parameters}
    arrays = some("GRU", directions=2)
    both = load(model_of("GRU", arrays, direction="bidirectional", linear_before_reset=1), "numpy")
    assert both["it"][0].cell == cells.GRU and both["it"][0].bidirectional
    single = {n: a[:1] if n[0] in "WRB" else a for n, a in arrays.items()} | {"P": None}
    del single["P"], single["initial_h"]
    for attributes, cell in (
        ({}, cells.GRU(reset_after=False)),
        ({"clip": 3.0}, None),
        ({"activations": ["Sigmoid", "Relu"]}, None),
    ):
        made = load(model_of("GRU", single, **attributes), "numpy")["it"][0].cell
        assert made == cell if cell else made.name == "GRU" and made.structure
    other = ["Tanh", "Tanh", "Relu", "Tanh"]
    apart = load(model_of("GRU", arrays, direction="bidirectional", activations=other), "numpy")
    assert [layer.bidirectional for layer in apart["it"].parts] == [False, False]
    assert pickle.loads(pickle.dumps(apart["it"][0].cell)) == apart["it"][0].cell


# -- models ----------------------------------------------------------------------------------------
STANDARD = {"LSTM": "LSTM", "PeepholeLSTM": "LSTM", "GRU": "GRU", "RNN": "RNN"}


@pytest.mark.parametrize("name", cells.__all__)
def test_every_cell(name: str) -> None:
    """With any number of steps; with lengths and resets in a stack of two directions."""
    cell = getattr(cells, name)
    assert kinds(check_export(numpy_layer(cell))) == {STANDARD.get(name, "Scan")}
    deep = numpy_layer(cell, 2, bidirectional=True, batch_first=True)
    inputs = "state lengths resets reset_state"
    assert kinds(check_export(deep, inputs)) == {"Scan"}


def test_every_op_has_an_operator() -> None:
    assert {*TABLE, "keep"} == {*OPERATORS, *MADE, "log_sigmoid"}


@pytest.mark.parametrize("ones", [False, True])
def test_random_cells(ones: bool) -> None:
    """Any graph: further matmuls, reductions of groups, values of one number per row."""
    for seed in range(12):
        cell = random_cell(seed, 6, ones)
        check_export(numpy_layer(cell, bidirectional=seed % 2 == 0), "state mask resets")


def test_masks_and_states() -> None:
    """What is not a node's: masks, repeated outputs; and what is: lengths and states."""
    layer = numpy_layer(cells.LSTM, 2, bidirectional=True)
    assert kinds(check_export(layer, "state lengths")) == {"LSTM"}
    assert kinds(check_export(layer, "lengths mask")) == {"Scan"}
    assert kinds(check_export(layer, "mask resets", masked_output="repeat")) == {"Scan"}
    assert kinds(check_export(layer, "lengths", masked_output="repeat")) == {"Scan"}
    check_export(numpy_layer(cells.GRUD, bidirectional=True), "mask resets")
    check_export(numpy_layer(cells.sLSTM(heads=2)), "resets")
    exact = anycell.numpy.RNN(cells.sLSTM, 3, 6, dtype="float64", seed=0)
    x = np.random.default_rng(0).normal(size=(4, 2, 3))
    (result, *_) = run(export(exact), {"x": x})
    assert_close(result, exact(x)[0], "float64", "forward")


@pytest.mark.parametrize(
    "cell", [cells.LSTM, cells.GRU, cells.PeepholeLSTM(gate_clip=0.5)], ids=str
)
def test_there_and_back(cell: Any) -> None:
    """A model loads as the layer it was, also one of activations with numbers."""
    layer = numpy_layer(cell, 2, bidirectional=True, batch_first=True)
    call, feeds = feeds_of(layer, "state lengths", 4, 3, 0)
    call["lengths"] = feeds["lengths"] = np.array([4, 0, 2])
    model = export(layer, inputs="state lengths")
    again = load(model.SerializeToString(), "numpy")
    assert again.plan.names == ["layer_0", "layer_1"] and again["layer_1"][0].cell == cell
    output, final = layer(feeds["x"], **call)
    for result, right in zip(again(**feeds), [output, *tuples(final)], strict=True):
        assert np.array_equal(result, right)
    for k, name in enumerate(again.plan.names):
        for place, weight in again[name][0].parameters.items():
            assert np.array_equal(weight, layer.parameters[place.replace("_l0", f"_l{k}")])


def test_there_and_back_with_numbers() -> None:
    arrays = some("LSTM", directions=2)
    names = ["HardSigmoid", "LeakyRelu", "Affine"] * 2
    numbers = {"activation_alpha": [0.3, 0.1, 0.5] * 2, "activation_beta": [0.4, 0.2] * 2}
    node = {"direction": "bidirectional", "activations": names, "input_forget": 1, "clip": 2.0}
    program = load(model_of("LSTM", arrays, **node, **numbers), "numpy")
    layer = program["it"][0]
    form = form_of(layer.cell)
    assert isinstance(form, Form) and form.clip == 2.0 and form.flag and form.peepholes
    again = load(export(layer), "numpy")["layer_0"][0]
    assert again.cell == layer.cell and kinds(check_export(layer)) == {"LSTM"}
    biasless = anycell.numpy.RNN(cells.GRU(reset_after=False), 3, 6, bias=False, seed=0)
    assert load(export(biasless), "numpy")["layer_0"][0].bias is False


# -- frameworks ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_layers_of_torch() -> None:
    torch = pytest.importorskip("torch")
    at, x = anycell.torch, torch.randn(4, 2, 3)
    for layer in (
        at.LSTM(3, 6, 2, bidirectional=True), at.GRU(3, 6, batch_first=True),
        at.LSTM(3, 6, proj_size=4), at.RNN(cells.JANET, 3, 6).to(torch.bfloat16).float(),
    ):  # fmt: skip
        layer.requires_grad_(False)
        output, final = layer(x)
        model = export(layer)
        for result, right in zip(
            run(model, {"x": x.numpy()}), [output, *tuples(final)], strict=True
        ):
            assert_close(result, right, "float32", "runtime")
        if kinds(model) == {"Scan"}:
            continue
        again = load(model)
        assert isinstance(again, torch.nn.Module) and len([*again.parameters()]) > 3
        for result, right in zip(again(x), [output, *tuples(final)], strict=True):
            assert torch.equal(result, right)
        again(x)[0].sum().backward()
        assert all(p.grad is not None for p in again.parameters())
    forced = torch.rand(2, 4) < 0.5
    inner = at.LSTM(3, 6, proj_size=4, batch_first=True)
    feedback, x = at.Feedback(inner, torch.nn.Linear(4, 2)).requires_grad_(False), x.swapaxes(0, 1)
    feeds = {"x": x.numpy(), "forced": forced.numpy()}
    y, final = feedback(x, forced=forced)
    for result, right in zip(run(export(feedback), feeds), [y, *final], strict=True):
        assert_close(result, right, "float32", "runtime")


def test_operators_of_torch() -> None:
    """They do what ONNX's own evaluator does."""
    torch = pytest.importorskip("torch")
    own = importlib.import_module("anycell.torch.onnx")
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=shape).astype("float32") for shape in ((2, 1, 3), (2, 1, 3), (3, 4)))

    def whole(*numbers: int) -> Any:
        return np.array(numbers)

    calls: list[tuple[str, list[Any], Arrays]] = [
        (name, [a, b], {}) for name in ("Add", "Div", "Mul", "Sub")
    ]
    calls += [(name, [a], {}) for name in ("Identity", "Relu", "Shape", "Sigmoid", "Tanh")]
    calls += [
        ("MatMul", [a, c], {}), ("Cast", [a], {"to": 11}), ("Concat", [a, b, a], {"axis": -1}),
        ("Gather", [a, np.array(-1)], {"axis": 2}), ("Gather", [a, whole(1, 0)], {}),
        ("Gather", [a, np.array([[0, 1]])], {"axis": -1}), ("Shape", [a], {"start": 1}),
        ("Gemm", [a[:, 0], c, c[0]], {"alpha": 2.0, "beta": 0.5}), ("Gemm", [a[:, 0], c], {}),
        ("Gemm", [a[0].T, c.T, c[:1]], {"transA": 1, "transB": 1}),
        ("Reshape", [a, whole(0, -1)], {}), ("Reshape", [a[:0], whole(0, 3)], {"allowzero": 1}),
        ("Slice", [a, whole(0), whole(1)], {}), ("Softmax", [a], {}), ("Softmax", [a], {"axis": 0}),
        ("Slice", [a, whole(-1, 0), whole(-9, 9), whole(2, 0), whole(-1, 1)], {}),
        ("Slice", [a, whole(0), whole(3), whole(-1), whole(2)], {}),
        ("Split", [a, whole(1, 2)], {"axis": 2}), ("Squeeze", [a, whole(1)], {}),
        ("Transpose", [a], {"perm": [2, 0, 1]}), ("Unsqueeze", [a, whole(0, -1)], {}),
        ("Equal", [a, a[:1]], {}), ("Where", [a < b, a, b], {}),
    ]  # fmt: skip
    assert {name for name, *_ in calls} == {*own.OPERATORS}
    for name, arrays, attributes in calls:
        names = [f"i{k}" for k in range(len(arrays))]
        outputs = [f"o{k}" for k in range(1 + (name == "Split"))]
        node = helper.make_node(name, names, outputs, **attributes)
        rights = ReferenceEvaluator(node, opsets={"": 22}).run(
            None, dict(zip(names, arrays, strict=True))
        )
        for tensors in ({0}, {k for k, array in enumerate(arrays) if array.dtype == np.float32}):
            given = [torch.from_numpy(v) if k in tensors else v for k, v in enumerate(arrays)]
            results = own.operator(name, given, **attributes)
            results = results if isinstance(results, tuple) else (results,)
            for result, right in zip(results, rights, strict=True):
                assert_close(np.asarray(result), right, "float32", "forward")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("opset", [7, 12, 13, 22])
def test_operators_of_each_opset(opset: int, framework: str) -> None:
    """Attributes that became inputs, and what may be left out, as in ONNX Runtime."""
    torch = pytest.importorskip("torch") if framework == "torch" else None
    arrays, old = some("RNN"), opset < 13
    model, ranks = model_of("RNN", arrays, opset), {"Squeeze": 3, "Unsqueeze": 6}
    del model.graph.output[:]

    def add(op: str, outputs: int = 1, given: Arrays = {}, **attributes: Any) -> None:  # noqa: B006
        """A node behind the recurrent one, whose arguments are attributes in old opsets."""
        at = len(model.graph.node)
        names = [f"{name}{at}" for name in given if not old]
        results = [f"Z{at} {k}" for k in range(outputs)]
        attributes |= given if old else {}
        model.graph.node.append(helper.make_node(op, ["Y", *names], results, **attributes))
        for name, value in zip(names, given.values(), strict=False):
            model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
        model.graph.output.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * ranks.get(op, 4))
            for name in results
        )

    add("Squeeze")
    add("Squeeze", given={"axes": [1]})
    add("Unsqueeze", given={"axes": [0, 3]})
    add("Softmax")
    add("Softmax", axis=2)
    add("Split", 2, {"split": [2, 4]}, axis=3)
    add("Split", 3, axis=3, **({"num_outputs": 3} if opset >= 18 else {}))
    add("Transpose")
    feeds = called(arrays)
    wanted = run(model, feeds)
    if torch is not None:
        feeds = {name: torch.from_numpy(array) for name, array in feeds.items()}
    for result, right in zip(load(model, framework)(**feeds), wanted, strict=True):
        result = result if torch is None else result.detach().numpy()
        assert_close(result, right, "float32", "runtime", axes=())


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_softmax_of_an_old_opset_without_rows(framework: str) -> None:
    torch = pytest.importorskip("torch") if framework == "torch" else None
    arrays = some("RNN")
    model = model_of("RNN", arrays, 9)
    model.graph.node.append(helper.make_node("Softmax", ["Y"], ["Z"], axis=3))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("Z", TensorProto.FLOAT, [None] * 4))
    feeds = {n: a[:0] if a.ndim == 1 else a[:, :0] for n, a in called(arrays).items()}
    if torch is not None:
        feeds = {name: torch.from_numpy(array) for name, array in feeds.items()}
    assert tuple(load(model, framework)(**feeds).shape)[2] == 0


def test_programs_of_torch(tmp_path: Path) -> None:
    """Are modules: they are copied, saved, compiled to other dtypes, and hold no other numbers."""
    torch = pytest.importorskip("torch")
    model = export(numpy_layer(cells.GRU, bidirectional=True), tmp_path / "gru.onnx")
    program, x = load(str(tmp_path / "gru.onnx")), torch.randn(4, 2, 3)
    assert model == onnx.load(tmp_path / "gru.onnx")
    torch.save(program, tmp_path / "gru.pt")
    for other in (copy.deepcopy(program), torch.load(tmp_path / "gru.pt", weights_only=False)):
        assert torch.equal(other(x)[0], program(x)[0])
    assert {name.rpartition(".")[2] for name in program.state_dict()} == {
        f"{kind}_{of}_l0{end}" for kind in ("weight", "bias") for of in ("ih", "hh")
        for end in ("", "_reverse")
    }  # fmt: skip
    assert program.double()(x.double())[0].dtype is torch.float64
    strange = helper.make_node("Sin", ["Y"], ["Z"])
    one = model_of("RNN", some("RNN"))
    one.graph.node.append(strange)
    one.graph.output[0].name = "Z"
    feeds = {name: torch.from_numpy(a) for name, a in called(some("RNN")).items()}
    with pytest.raises(ValueError, match=r"Sin node: given Tensor; expected Add, .*\. Load it for"):
        load(one)(**feeds)
    assert np.array_equal(
        load(one)["it"](**feeds)[0].detach(),
        load(model_of("RNN", some("RNN")))(**feeds)[0].detach(),
    )


@pytest.mark.slow
def test_layers_of_keras() -> None:
    keras = pytest.importorskip("keras")
    ak, x = anycell.keras, np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32")
    for layer, kind in (
        (ak.LSTM(6, return_sequences=True), "LSTM"),
        (ak.GRU(6, return_sequences=True, reset_after=False), "GRU"),
        (ak.GRU(6, return_sequences=True, activation="relu"), "GRU"),
        (ak.SimpleRNN(6, return_sequences=True), "RNN"),
        (ak.RNN(cells.JANET, 6, return_sequences=True), "Scan"),
        (keras.layers.Bidirectional(ak.GRU(6, return_sequences=True)), "GRU"),
        (ak.LSTM(6, return_sequences=True, activation="gelu"), "Scan"),
    ):
        output = np.asarray(layer(x))
        model = export(layer)
        assert kinds(model) == {kind}
        assert_close(run(model, {"x": x})[0], output, "float32", "runtime")
    mask = np.array([[True, False, True, False], [False, False, True, True]])
    for zero in (False, True):
        layer = ak.LSTM(6, return_sequences=True, zero_output_for_mask=zero)
        output = np.asarray(layer(x, mask=mask))
        found = run(export(layer, inputs="mask"), {"x": x, "mask": mask})[0]
        assert_close(found, output, "float32", "runtime")
    forced, readout = np.random.default_rng(1).random((2, 4)) < 0.5, keras.layers.Dense(2)
    feedback = ak.Feedback(ak.GRU(6), readout, return_state=True)
    with pytest.raises(ValueError, match=r"layer: given gru_.*, which has no weights yet. Call it"):
        export(feedback)
    rights = feedback(x, forced=forced, mask=mask)
    feeds = {"x": x, "forced": forced, "mask": mask}
    found = run(export(feedback, inputs="mask"), feeds)
    for result, right in zip(found, (rights[0], np.asarray(rights[1])[None]), strict=True):
        assert_close(result, np.asarray(right), "float32", "runtime")
    back = ak.GRU(6, go_backwards=True)
    turned = keras.layers.Bidirectional(ak.GRU(6, go_backwards=True), backward_layer=ak.GRU(6))
    for layer in (back, turned):
        layer(x)
        with pytest.raises(ValueError, match=r"go_backwards=True; expected False\. Put it in"):
            export(layer)


@pytest.mark.slow
def test_layers_of_jax() -> None:
    jax = pytest.importorskip("jax")
    layer = anycell.jax.RNN(cells.LayerNormGRU, 3, 6, num_layers=2)
    params, x = layer.init(jax.random.key(0)), np.ones((4, 2, 3), np.float32)
    output, h = layer(params, jax.numpy.asarray(x))
    for result, right in zip(run(export(layer, params=params), {"x": x}), (output, h), strict=True):
        assert_close(result, right, "float32", "runtime")
    with pytest.raises(TypeError, match="params: given None; expected the parameters of `init`"):
        export(layer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's exporters
@pytest.mark.parametrize(("dynamo", "opset"), [(False, 9), (False, None), (True, None)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_models_of_torch(kind: str, dynamo: bool, opset: int | None, tmp_path: Path) -> None:
    """What torch's exporters write of layers and a readout loads, and trains."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layer = getattr(torch.nn, kind)
            self.layer = layer(3, 6, 2, batch_first=True, bidirectional=True)
            self.readout = torch.nn.Linear(12, 2)

        def forward(self, x: Any) -> Any:
            return self.readout(self.layer(x)[0][:, -1])

    model, x, path = Model().eval(), torch.randn(2, 4, 3), tmp_path / "model.onnx"
    options = {"dynamo": dynamo, "opset_version": opset, "verbose": False}
    torch.onnx.export(model, (x,), path, input_names=["x"], **options)
    program = load(path)
    assert len(program.plan.names) == 2
    assert_close(program(x).detach(), model(x).detach(), "float32", "forward")
    assert_close(load(path, "numpy")(x.numpy()), model(x).detach(), "float32", "runtime")
    program(x).sum().backward()


def test_needs_no_torch() -> None:
    """Nor does anycell need onnx until it is asked for."""
    said = python("""
        import sys
        sys.modules["torch"] = None
        import anycell
        assert "onnx" not in sys.modules
        layer = anycell.numpy.GRU(3, 6)
        print(type(anycell.onnx.load(anycell.onnx.export(layer), "numpy")).__module__)
    """)
    assert said == "anycell.numpy.onnx\n"


# -- errors ----------------------------------------------------------------------------------------
def refused(match: str, model: Any, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=match):
        load(model, "numpy")


def test_malformed_models(tmp_path: Path) -> None:
    arrays = some("LSTM")
    for attributes, message in (
        ({"direction": "backwards"}, "direction=b'backwards'; expected one of forward, reverse"),
        ({"layout": 2}, "'it': given layout=2; expected 0 or 1"),
        ({"clip": -1.0}, "clip=-1.0; expected a number above 0"),
        ({"activations": ["Tanh"]}, r"activations=\['Tanh'\]; expected 3 names"),
        ({"activations": ["Sin", "Tanh", "Tanh"]}, "'Sin'; expected one of Affine, Elu"),
        ({"activations": [b"\xba", b"Tanh", b"Tanh"]}, "activation '\ufffd'; expected one of"),
        ({"activations": ["Affine", "Tanh", "Tanh"]}, "Affine without its numbers; expected act"),
        ({"hidden_size": 5}, r"R, float32 \[1, 24, 6\]; expected \[1, 24, 5\] of real numbers"),
        ({"colour": 3}, r"checker refuses \(Unrecognized attribute: colour"),
    ):
        refused(message, model_of("LSTM", arrays, **attributes))
    refused("direction=b'bidir", model_of("LSTM", arrays, direction="bidir"))
    wrong = {"W": arrays["W"][0], "B": arrays["B"][:, :9], "P": arrays["P"].astype("float64")}
    for name, array in (wrong | {"R": np.array(3.0, np.float32)}).items():
        refused("; expected .* of real numbers", model_of("LSTM", {**arrays, name: array}))
    refused(
        "checker refuses \\(Node .*input 1 is marked single",
        model_of("LSTM", {"R": arrays["R"], "X": arrays["X"]}),
    )
    open_ = model_of("GRU", some("GRU"))
    del open_.graph.initializer[:]
    open_.graph.input.extend(
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * (2 if n == "B" else 3))
        for n in "WRB"
    )
    refused("GRU node 'it': given W, which is not known before it runs; expected a const", open_)
    refused("opset 6; expected opset 7 or newer. Convert it", model_of("RNN", some("RNN"), 6))
    refused("model: given one that ONNX's checker refuses", b"no model")
    refused("model: given int; expected a path", 3, TypeError)
    refused("none.onnx", tmp_path / "none.onnx", FileNotFoundError)
    scan = export(numpy_layer(cells.JANET))
    refused("given .*Scan.*; expected a graph with LSTM, GRU or RNN nodes. Nodes inside", scan)
    with pytest.raises(ValueError, match="framework: given 'jax'; expected 'torch' or 'numpy'"):
        load(scan, "jax")


def test_malformed_calls() -> None:
    program = load(model_of("RNN", some("RNN")), "numpy")
    for inputs, named in (((), {}), ((1,) * 9, {}), ((1,), {"X": 1}), ((), {"Z": 1})):
        with pytest.raises(
            TypeError, match=r"inputs: given .*; expected X, sequence_lens, initial"
        ):
            program(*inputs, **named)
    with pytest.raises(KeyError, match="name: given 'that'; expected one of it"):
        program["that"]
    with pytest.raises(ValueError, match=r"X: given shape \[4, 3\]; expected \[time, batch, inp"):
        program["it"](np.zeros((4, 3), np.float32))
    arrays = some("RNN")
    back = load(model_of("RNN", arrays, direction="reverse"), "numpy")["it"]
    for lengths, message in (
        ([5, 1], r"sequence_lens: given shape \[2\]; expected \[3\], a length for each row"),
        (arrays["X"], r"sequence_lens: given shape \[5, 3, 4\]; expected \[3\]"),
        ([5, 1, 6], r"lengths: given .*6"),
        ([5, 1, -1], r"lengths: given .*-1"),
    ):
        with pytest.raises(ValueError, match=message):
            back(arrays["X"], lengths)
    for layer, arguments, error, message in (
        (3, {}, TypeError, "layer: given int; expected a layer of anycell.torch"),
        (
            anycell.numpy.LSTM(3, 6),
            {"inputs": "hx"},
            ValueError,
            "'hx'; expected names among state",
        ),
        (anycell.numpy.LSTM(3, 6), {"inputs": "static"}, ValueError, "inputs: given 'static'"),
        (anycell.numpy.LSTM(3, 6), {"inputs": 3}, ValueError, "inputs: given 3; expected names"),
        (anycell.numpy.LSTM(3, 6), {"inputs": ["state", 3]}, ValueError, "inputs: given 3; expect"),
        (anycell.numpy.LSTM(3, 6), {"params": {}}, ValueError, "params: given dict; expected None"),
        (
            anycell.numpy.LSTM(3, 6),
            {"masked_output": "no"},
            ValueError,
            "masked_output: given 'no'",
        ),
        (numpy_layer(cells.LSTM).cell, {}, TypeError, "layer: given Cell; expected a layer"),
    ):
        with pytest.raises(error, match=message):
            export(layer, **arguments)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_models(count: int) -> None:
    """Whatever bytes change: an error in words, or a model that loads."""
    rng, models = random.Random(0), []
    for op in OPS:
        models.append(model_of(op, some(op)).SerializeToString())
    named = {"activations": ["Elu", "Tanh"], "activation_alpha": [0.5], "clip": 2.0}
    models.append(model_of("GRU", some("GRU"), **named).SerializeToString())
    models.append(export(numpy_layer(cells.GRU)).SerializeToString())
    loaded = 0
    for k in range(count):
        data = bytearray(models[k % len(models)])
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            change = rng.randrange(3)
            if change == 0:
                data[place] = rng.randrange(256)
            elif change == 1:
                del data[place : place + rng.randint(1, 9)]
            else:
                data[place:place] = rng.randbytes(rng.randint(1, 9))
        try:
            load(bytes(data), "numpy")
            loaded += 1
        except (ValueError, TypeError) as error:
            assert "given" in str(error), error
    assert 0 < loaded < count
