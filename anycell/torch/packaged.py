"""A program of ``torch.export`` whose layers are operators of a library, for C++."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from anycell.layer.checks import refuse
from anycell.layer.signature import FLAGS, OF_STATES
from anycell.plan import Layer
from anycell.torch.operators.ops import planned

LIBRARIES = Path(torch.__file__).parent / "lib"
KIND = torch.export.ExportedProgram
_INPUTS = "x", "static", *FLAGS


def operators_of(program: Any, make: Callable[..., Any]) -> list[Any]:
    """The layers of a program as operators, by ``anycell.exporter.operators.Operator``."""
    layers = _layers(program)
    if not layers:
        hint = (
            "LSTM and GRU are operators of torch there: compile such a program by"
            " torch._inductor.aoti_compile_and_package, or use RNN(cells.LSTM, ...), which loads"
            " the same weights."
        )
        expected = "one with layers of anycell.torch.RNN"
        refuse("model", "a program without operators of anycell", expected, hint)
    operators = list[Any]()
    for k, node in enumerate(layers):
        tensors, text, hyper = node.args
        values = [tensor.meta["val"] for tensor in tensors]
        layer, x = planned(values, text, hyper)
        types = layer.plan.types
        if layer.plan.engine != "cpu" or types.mixed or types.quantized:
            given = f"a layer in {layer.dtype} on {x.device.type}"
            refuse("model", given, "float32 or float64, on the CPU")
        if layer.options.training and layer.cell.keeps:
            refuse("model", "a layer in training, which draws random masks", "one after eval()")
        _learned(program, layer, node)  # refuses before anything is written
        shapes = {name: value.shape for name, value in layer.named(values).items()}
        operators.append(make(f"layer_{k}", layer, shapes))
    return operators


def package(program: Any, space: str, operators: Sequence[Any], library: Path, path: Path) -> None:
    """Writes a program as a package of AOTInductor, with operators in place of its layers.

    Args:
        space: the name before those of the operators.
        operators: from ``operators_of``.
        library: what has their kernels; this process loads it, too.
    """
    torch._inductor.aoti_compile_and_package(
        substituted(program, space, operators, library), package_path=str(path)
    )


def substituted(program: Any, space: str, operators: Sequence[Any], library: Path) -> Any:
    """A copy of a program with operators in place of its layers."""
    names = [f"{space}::{made.name}" for made in operators]
    if not all(map(torch._C._dispatch_has_kernel, names)):
        torch.ops.load_library(str(library))
        for name, made in zip(names, operators, strict=True):
            torch.library.register_fake(name, _fake(made))
    with warnings.catch_warnings():  # torch's own copies warn of torch
        warnings.simplefilter("ignore", FutureWarning)
        program = copy.deepcopy(program)
    for node, made in zip(_layers(program), operators, strict=True):
        _replace(program, node, made, getattr(getattr(torch.ops, space), made.name).default)
    return program


def _layers(program: Any) -> list[Any]:
    forward = torch.ops.anycell.forward.default
    return list(program.graph.find_nodes(op="call_function", target=forward))


def _fake(made: Any) -> Callable[..., tuple[Tensor, ...]]:
    count = len(made.arguments)

    def fake(*tensors: Tensor) -> tuple[Tensor, ...]:
        of_call = dict(zip(("STEPS", "ROWS"), tensors[0].shape, strict=False))
        results = made.tensors[count : count + made.results]
        return tuple(
            tensors[0].new_empty([of_call.get(size, size) for size in sizes])
            for _, sizes in results
        )

    return fake


def _replace(program: Any, node: Any, made: Any, target: Any) -> None:
    """Puts an operator in the place of the node of a layer."""
    graph, layer = program.graph, made.layer
    arrays: dict[str, Any] = layer.named(node.args[0])
    mode = arrays["x"].meta["val"].fake_mode

    def call(function: Any, *args: Any, **options: Any) -> Any:
        new = graph.call_function(function, args, options)
        with mode:
            values = fx.node.map_arg(args, lambda n: n.meta["val"])
            new.meta["val"] = function(*values, **options)
        return new

    aten = torch.ops.aten
    arguments, initial = [], {f"reset_state {s.name}": s for s in layer.cell.states}
    weights = torch.from_numpy(made.pack(_learned(program, layer, node)))
    packed = _constant(program, f"{made.name}_packed", weights, mode)
    with graph.inserting_before(node):
        for name in made.arguments:
            if name.startswith("gates "):
                weight = arrays[name.removeprefix("gates ")]
                arguments.append(call(aten.linear.default, arrays["x"], weight))
            elif name == "packed weights":
                arguments.append(packed)
            elif name not in arrays:  # what resets restore
                state = initial[name]
                shape = [len(layer.options.reverse), layer.size(state.size)]
                dtype = getattr(torch, layer.dtype)
                arguments.append(call(aten.full.default, shape, state.initial, dtype=dtype))
            else:
                arguments.append(arrays[name])
        dense = [n if n is packed else call(aten.contiguous.default, n) for n in arguments]
        new = call(target, *dense)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _learned(program: Any, layer: Layer, node: Any) -> dict[str, Any]:
    """The weights of a layer, as arrays of NumPy by name."""
    return {
        name: _value(program, of, name).detach().contiguous().numpy()
        for name, of in layer.named(node.args[0]).items()
        if name not in _INPUTS and not name.startswith(OF_STATES)
    }


def _constant(program: Any, name: str, tensor: Tensor, mode: Any) -> Any:
    """Adds a constant to a program, before the inputs of a call."""
    specs = program.graph_signature.input_specs
    place = [spec.kind for spec in specs].index(InputKind.USER_INPUT)
    first = [n for n in program.graph.nodes if n.op == "placeholder"][place]
    with program.graph.inserting_before(first):
        node = program.graph.placeholder(name)
    node.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
    specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, True))
    program.state_dict[name] = tensor
    return node


def _value(program: Any, node: Any, name: str) -> Tensor:
    """The value of a node that depends on no input of a call."""
    if node.op == "placeholder":
        signature, target = program.graph_signature, node.name
        for of_kind in (signature.inputs_to_parameters, signature.inputs_to_buffers):
            if target in of_kind:
                return program.state_dict.get(
                    of_kind[target], program.constants.get(of_kind[target])
                )
        if target in signature.inputs_to_lifted_tensor_constants:
            return program.constants[signature.inputs_to_lifted_tensor_constants[target]]
        expected = "weights that do not depend on inputs of the program"
        refuse("model", f"a layer whose {name} follows from the input {target}", expected)
    args, options = fx.node.map_arg((node.args, node.kwargs), lambda n: _value(program, n, name))
    return node.target(*args, **options)
