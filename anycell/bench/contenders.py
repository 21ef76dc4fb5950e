"""The contenders. Each gets the same problem and returns arrays under the same names.

A contender is built once per problem and then asked for *tasks*, mostly inference and training; see
``tasks``. The list of all is at the end.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from anycell.bench.errors import Unsupported, need
from anycell.bench.problem import Problem, by_direction, find_cell, rounds
from anycell.bench.tasks import Array, Contender, Mode, Task
from anycell.engines import reference as engine
from anycell.numpy.host import numpy_dtype
from anycell.plan.dtype import DTYPES
from anycell.usage import UsageError

# -- contenders on torch tensors -------------------------------------------------------------------


def from_module(
    build: Callable[[], Any],
    problem: Problem,
    dtype: str | None = None,
    quantize: Callable[[Any], Any] | None = None,
) -> Contender:
    """Any ``module(x)``, made by ``build()``, that returns the output, or a tuple that starts so.

    In 16 bits inference is of a module in that dtype, training of a float32 one under autocast.
    In 8 bits there is only inference, of ``quantize(module)``.
    """
    import torch

    types = DTYPES[dtype or problem.dtype]
    kind = getattr(torch, types.storage.name)
    module = build().to(kind)
    if types.quantized:
        if quantize is None:
            raise Unsupported(f"no {types.name}")
        module = quantize(module)
    tasks: dict[Mode, Task] = {"inference": _inference(module, problem, kind)}
    if types.mixed:
        autocast = functools.partial(torch.autocast, "cpu", kind)
        tasks["training"] = _training(build(), problem, torch.float32, autocast)
    elif not types.quantized:
        tasks["training"] = _training(module, problem, kind)
    return Contender(tasks, engine=getattr(module, "engine", None))


def _inference(module: Any, problem: Problem, kind: Any) -> Task:
    """A forward pass without autograd, of inputs in that dtype."""
    import torch

    x, static = _inputs(problem, kind)

    def infer() -> Any:
        with torch.inference_mode():
            return _output(module(x, **static))

    def ready() -> None:
        module.eval()
        _seed(problem)

    return Task(infer, lambda output: {"output": _array(output)}, ready)


def _training(
    module: Any, problem: Problem, kind: Any, around: Callable[[], Any] = nullcontext
) -> Task:
    """A forward pass, with its settings around it, and a backward pass."""
    import torch

    x, static = _inputs(problem, kind)
    leaves = {"x": x.requires_grad_(), **dict(module.named_parameters())}
    arriving = functools.cache(torch.from_numpy(problem.dy).to)  # in the dtype of the output

    def train() -> Any:
        # The gradient of (output * dy).sum(), without timing that sum.
        with around():
            output = _output(module(x, **static))
        output.backward(arriving(output.dtype))
        return output.detach()

    def ready() -> None:
        module.train()
        for leaf in leaves.values():
            leaf.grad = None
        _seed(problem)

    def arrays(output: Any) -> dict[str, Array]:
        # What has no gradient stays absent: the gate says which one is missing.
        grads = {k: _array(v.grad) for k, v in leaves.items() if v.grad is not None}
        return {"output": _array(output), **grads}

    return Task(train, arrays, ready)


def _inputs(problem: Problem, kind: Any) -> tuple[Any, dict[str, Any]]:
    """A copy of the input, and the one per sequence, if any, in that dtype."""
    import torch

    static = {} if problem.static is None else {"static": torch.from_numpy(problem.static).to(kind)}
    return torch.from_numpy(problem.x).to(kind, copy=True), static


def _output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _array(tensor: Any) -> Array:
    """The tensor for the gate, in float32 where NumPy has no such dtype."""
    array: Array = (tensor.float() if tensor.element_size() == 2 else tensor).numpy()
    return array


def _seed(problem: Problem) -> None:
    """The same random masks for everybody."""
    if problem.cell.definition.keeps:
        import torch

        torch.manual_seed(problem.seed)


NO_KERNEL = ("not implemented for", "could not create a primitive")


def _torchs(contender: Contender) -> Contender:
    """`Unsupported` where PyTorch says that it has no kernel for a dtype on this machine."""

    def checked(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:
            if any(words in str(error) for words in NO_KERNEL):
                raise Unsupported(str(error).partition("\n")[0]) from None
            raise

    for task in contender.tasks.values():
        task.work = functools.partial(checked, task.work)
    return contender


def _load(module: Any, problem: Problem) -> Any:
    import torch

    module = module.to(getattr(torch, problem.wide))
    module.load_state_dict({k: torch.from_numpy(v) for k, v in problem.weights.items()})
    return module


def torch_nn(problem: Problem) -> Contender:
    """``torch.nn.LSTM``, ``GRU``, ``RNN``."""
    build = functools.partial(_nn_module, problem)
    return _torchs(from_module(build, problem, quantize=_quantized))


def _quantized(module: Any) -> Any:
    """The module with weights of 8 bits, by what PyTorch itself has."""
    import torch

    model = torch.nn.Sequential(module)
    with warnings.catch_warnings():  # it will move to torchao, which has no recurrent layers yet
        warnings.simplefilter("ignore")
        (layer,) = torch.ao.quantization.quantize_dynamic(model, {type(module)}, torch.qint8)
    if type(layer) is type(module):
        raise Unsupported(f"torch.ao.quantization has no {type(module).__name__}")
    return layer


def _nn_module(problem: Problem) -> Any:
    from torch import nn

    name = problem.cell.name
    if not problem.cell.classic or name not in ("LSTM", "GRU", "RNN"):
        raise Unsupported(f"torch.nn has no {name}")
    return _load(getattr(nn, name)(problem.shape.I, problem.shape.H, **problem.flags), problem)


def anycell_torch(problem: Problem) -> Contender:
    """The layers that replace ``torch.nn.LSTM`` and ``GRU``; ``RNN(cell, ...)`` for other cells."""
    frontend: Any = importlib.import_module("anycell.torch")
    compress: Any = importlib.import_module("anycell.compress")
    cell, shape = problem.cell, problem.shape

    def build() -> Any:
        if cell.classic and cell.name in ("LSTM", "GRU"):
            layer = getattr(frontend, cell.name)
        else:
            layer = functools.partial(frontend.RNN, cell.definition)
        return _load(layer(shape.I, shape.H, **problem.flags), problem)

    contender = from_module(build, problem, quantize=compress.quantize)
    alone = [l.name for l in cell.definition.linears] == ["hh"]
    if alone and not problem.types.quantized:
        contender.tasks["recurrence"] = _recurrence(problem)
    return contender


def _recurrence(problem: Problem) -> Task:
    """The primitive alone: one direction of the first layer, its input projected before."""
    import anycell

    arguments = recurrence_arguments(problem)
    return Task(lambda: anycell.recurrence(*arguments)[0])


def recurrence_arguments(problem: Problem, dtype: str | None = None) -> tuple[Any, ...]:
    """Cell, projected inputs, weights, state and parameters, as the primitive takes them."""
    kind, cell = numpy_dtype(dtype or problem.dtype), problem.cell.definition
    first = by_direction(problem.weights, problem.shape)[0][0]
    w = {name: value.astype(dtype or problem.wide) for name, value in first.items()}
    x = problem.x.astype(dtype or problem.wide)
    gates = x @ w["weight_ih"].T + w.get("bias_ih", x.dtype.type(0))
    weights = {name: w[name].astype(kind) for name in ("weight_hh", "bias_hh") if name in w}
    params = {name: w[name].astype(kind) for name in cell.param_names}
    return cell, gates.astype(kind), weights, None, params


def torch_loop(problem: Problem) -> Contender:
    """A Python loop over time: by hand for the classics, operation by operation for other cells."""
    return _torchs(from_module(functools.partial(_loop_module, problem), problem))


def torch_compile(problem: Problem) -> Contender:
    """The same loop under ``torch.compile``; its first call compiles, minutes where T is large."""
    import torch

    if not problem.cell.classic:
        raise Unsupported(f"no loop for {problem.cell.name} that torch.compile could take whole")

    def build() -> Any:
        module = _loop_module(problem)
        module.compile(fullgraph=False, dynamic=False)
        return module

    torch._dynamo.reset()
    return _torchs(from_module(build, problem))


def _loop_module(problem: Problem) -> Any:
    from anycell.bench.torch_loops import Loop

    return Loop(problem)


# -- contenders on TensorFlow's tensors ------------------------------------------------------------


def _of_keras(name: str) -> Callable[[Problem], Contender]:
    """A contender of ``keras_layers``, which imports TensorFlow."""

    def make(problem: Problem) -> Contender:
        # The weights of some cells are PyTorch's, which may load Triton. It must be before
        # TensorFlow: both bring an LLVM, and Triton's aborts when it comes second.
        _ = problem.weights
        module: Any = importlib.import_module("anycell.bench.keras_layers")
        module.set_threads(problem.threads)
        contender: Contender = getattr(module, name)(problem)
        return contender

    return make


# -- contenders on NumPy arrays --------------------------------------------------------------------


def numpy_loop(problem: Problem) -> Contender:
    """The LSTM from scratch: a Python loop over time, backward by hand."""
    from anycell.bench.numpy_loops import SCANS, Stack

    if not problem.cell.classic or problem.cell.name not in SCANS:
        raise Unsupported(f"no NumPy loop for {problem.cell.name}")
    if rounds(problem.dtype):
        raise Unsupported(f"no NumPy loop in {problem.dtype}")
    stack = Stack(problem)

    def train() -> dict[str, Array]:
        return {"output": stack.forward(problem.x), **stack.backward(problem.dy)}

    tasks: dict[Mode, Task] = {
        "inference": Task(lambda: stack.forward(problem.x)),
        "training": Task(train, dict),
    }
    return Contender(tasks, functools.partial(blas_threads, problem.threads))


def anycell_numpy(problem: Problem) -> Contender:
    """The layer without a framework; in 16 bits it trains in 16 bits, too."""
    import anycell

    cell, shape = problem.cell.definition, problem.shape
    if cell.keeps:
        raise Unsupported(f"{problem.cell.name} draws random masks, here from NumPy's generator")
    dtype = problem.types.storage.name
    layer = anycell.numpy.RNN(
        cell, shape.I, shape.H, dtype=dtype, seed=problem.seed, **problem.flags
    )
    layer.set_parameters(problem.weights)
    if problem.types.quantized:
        layer = anycell.compress.quantize(layer)
    x, dy = (array.astype(layer.dtype) for array in (problem.x, problem.dy))
    static = None if problem.static is None else problem.static.astype(layer.dtype)

    def train() -> dict[str, Array]:
        output, _ = layer.forward(x, static=static, training=True)
        return {"output": output, "x": layer.backward(dy)[0]}

    tasks: dict[Mode, Task] = {"inference": Task(lambda: layer.forward(x, static=static)[0])}
    if not problem.types.quantized:
        tasks["training"] = Task(train, lambda kept: {**kept, **layer.grads})
    around = functools.partial(blas_threads, problem.threads)
    return Contender(tasks, around, (layer.plan.engine, layer.plan.reason))


def onnxruntime(problem: Problem, settings: Mapping[str, str] | None = None) -> Contender:
    """The same weights as an ONNX graph: inference in float32, of LSTMs in int8 too.

    The weights are constants of the graph, which a session packs once. Those of int8 are of 7 bits
    where products of 8 bits would saturate, and wrong results come out. `settings` are entries of
    its configuration; by default all are ONNX Runtime's own, so that its threads spin while it runs
    as they do for its users.
    """
    if problem.dtype not in ("float32", "int8"):
        raise Unsupported(f"ONNX Runtime has no {problem.dtype} recurrent layers")
    from anycell.bench import onnx_graph

    model, remark = onnx_graph.build(problem), None
    if problem.types.quantized:
        reduced = onnx_graph.saturates()
        model = onnx_graph.quantized(model, reduced)
        if reduced:
            remark = "weights of 7 bits, for its products of 8 bits saturate without VNNI"
    runtime: Any = need("onnxruntime", "the onnxruntime peer")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = problem.threads
    options.inter_op_num_threads = 1
    for key, value in (settings or {}).items():
        options.add_session_config_entry(key, value)
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {"x": problem.x}
    return Contender({"inference": Task(lambda: session.run(None, feed)[0])}, remark=remark)


def openvino(problem: Problem) -> Contender:
    """The same ONNX graph in Intel's runtime, where that computes in the dtype on this machine."""
    hint = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(problem.dtype)
    if hint is None:
        raise Unsupported(f"OpenVINO has no {problem.dtype} recurrent layers")
    if problem.cell.name == "PeepholeLSTM":
        raise Unsupported("OpenVINO leaves out the peepholes of an ONNX LSTM")
    try:
        runtime: Any = need("openvino", "the openvino peer", "openvino")
    except UsageError as error:  # it is large, and the others can be measured without it
        raise Unsupported(str(error)) from None
    from anycell.bench.onnx_graph import build

    core = runtime.Core()
    settings = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": problem.threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = core.compile_model(core.read_model(build(problem)), "CPU", settings)
    precision = model.get_property("INFERENCE_PRECISION_HINT").to_string()
    if precision != hint:
        raise Unsupported(f"OpenVINO computes in {precision} on this machine")
    request, feed = model.create_infer_request(), {"x": problem.x}
    infer = functools.partial(request.infer, feed, share_inputs=True)
    return Contender({"inference": Task(infer, lambda _: {"output": request.results["y"].copy()})})


@contextmanager
def blas_threads(threads: int) -> Iterator[None]:
    """NumPy's BLAS with this many threads, if threadpoolctl is installed."""
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        yield
        return
    with threadpool_limits(limits=threads, user_api="blas"):
        yield


# -- the list --------------------------------------------------------------------------------------

SUBJECT = "anycell"
CALM = {"session.intra_op.allow_spinning": "0"}  # threads that sleep where they have no work
OUR_LSTM = "anycell-LSTM"  # what our own LSTM takes on the same shape: the price of another cell
FLOAT32 = "anycell-float32"  # what our layer takes in float32: the gain of fewer bits
CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    SUBJECT: anycell_torch,
    OUR_LSTM: anycell_torch,
    FLOAT32: anycell_torch,
    "anycell.numpy": anycell_numpy,
    "torch.nn": torch_nn,
    "torch-loop": torch_loop,
    "torch-compile": torch_compile,
    "numpy-loop": numpy_loop,
    "onnxruntime": onnxruntime,
    "onnxruntime-calm": functools.partial(onnxruntime, settings=CALM),
    "openvino": openvino,
    "anycell.keras": _of_keras("ours"),
    "keras": _of_keras("theirs"),
    "keras-xla": _of_keras("xla"),
    "keras-loop": _of_keras("loop"),
    "tf-block": _of_keras("block"),
}
DEFAULT_PEERS = ("torch.nn", "torch-loop")
ON_TENSORFLOW = ("anycell.keras", "keras", "keras-xla", "keras-loop", "tf-block")
# Beyond NumPy and PyTorch.
PACKAGES = dict.fromkeys(("onnxruntime", "onnxruntime-calm"), ("onnx", "onnxruntime"))
PACKAGES |= dict.fromkeys(ON_TENSORFLOW, ("keras", "tensorflow"))


def make(name: str, problem: Problem) -> Contender:
    """The contender of that name, built; `Unsupported` where it has no such layer."""
    return CONTENDERS[name](posed(name, problem))


def posed(name: str, problem: Problem) -> Problem:
    """The problem that this contender solves: the same, except for our LSTM among other cells, and
    for float32 among other dtypes.
    """
    if name == OUR_LSTM:
        return replace(problem, cell=find_cell("LSTM"))
    return replace(problem, dtype="float32") if name == FLOAT32 else problem


def reference(problem: Problem, mode: Mode) -> dict[str, Array]:
    """Output, in training all gradients too, in float64: by ``torch.nn``, or by the plain loop."""
    if mode == "recurrence":
        cell, gates, weights, state, params = recurrence_arguments(problem, "float64")
        return {"output": engine.run(cell, gates, weights, state, params)[0]}
    try:
        task = from_module(lambda: _nn_module(problem), problem, "float64").task(mode)
    except Unsupported:
        task = from_module(lambda: _loop_module(problem), problem, "float64").task(mode)
    task.prepare()
    task.call()
    return task.results()
