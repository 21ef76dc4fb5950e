"""``export``: a trained model as a program without Python."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anycell.exporter import c, machine, operators, wasm
from anycell.exporter.model import Model
from anycell.exporter.program import VERSION, WEIGHTS, padded
from anycell.exporter.schedule import Schedule
from anycell.layer.checks import refuse
from anycell.layer.parts import Part
from anycell.requirement import installed

TARGETS = ("c", *machine.PLATFORMS, "torch")
STEPS = 32  # of the test vector
# What C and C++ take as names of their own, and of headers, which a file of this name would hide.
TAKEN = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept
    const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend
    goto if inline int long main mutable namespace new noexcept not not_eq nullptr operator or or_eq
    private protected public register reinterpret_cast requires restrict return short signed sizeof
    static static_assert static_cast std struct switch template this thread_local throw true try
    typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
    assert complex ctype errno fenv inttypes iso646 limits locale math setjmp signal stdalign stdarg
    stdatomic stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time uchar wchar
    wctype
    """.split()
)
STACK = 1 << 16  # bytes of stack in WebAssembly, besides what a step keeps there


def export(
    model: Any, out: str | os.PathLike[str], *, target: str = "c", name: str = "model",
    weights: str = "float32", blob: bool = False,
) -> list[Path]:  # fmt: skip
    """Writes a trained model as a C library: the computation and the weights, and nothing else.

    The library computes one row in float32, sample by sample or block by block. It allocates
    nothing, takes no locks, has no variables of its own, and as source calls nothing but functions
    of ``math.h``, as machine code nothing at all: it may run in an audio callback or on a
    microcontroller. The caller owns the state::

        float state[MODEL_STATE_SIZE];
        model_reset(state);
        model_step(state, in, out);             /* MODEL_INPUTS numbers to MODEL_OUTPUTS numbers */
        model_process(state, in, out, steps);   /* the same for each of these steps */

    A model with layers in both directions, or in reverse, has no ``step``, because it needs the
    whole sequence. Of a layer of Keras without ``return_sequences`` the last row is the output::

        model_process(state, in, out, steps, memory);  /* MODEL_MEMORY * steps numbers */

    Args:
        model: a layer of ``anycell.torch``, ``anycell.keras`` or ``anycell.numpy`` of any cell,
            also stacked, or ``Feedback``; an ``nn.Sequential`` or ``keras.Sequential`` of such
            layers, linear layers, layer norms and activations; or a list of them, in order. The
            output of a recurrent layer goes to the next layer at every step. A cell's static input
            is appended to each sample, and for ``Feedback`` a number that is 1 where a step is not
            forced, and the series has no influence, else 0.
        out: a folder, which is made if there is none. Files of the same names are replaced.
        target: "c" for C99 source, or a machine for an object file: "x86-64", "x86-64-avx2",
            "x86-64-avx512", "aarch64" and "riscv64" of Linux; "x86-64-macos", "aarch64-macos",
            "x86-64-windows", "aarch64-windows"; "armv7", "cortex-m4", "cortex-m55"; "wasm32".
        name: of the files, and what names in the header begin with.
        weights: "float32" or "bfloat16", which takes half the memory. Layers with weights of 8 bits
            keep these (``anycell.compress.quantize``).
        blob: whether weights are in a file of their own, ``name.bin``, so that those of a model
            trained again replace it without a compiler. The program brings it into memory, and
            enters it in each state: ``model_load(state, weights, size)`` is 0, or says what is
            wrong.

    Returns:
        the files: source or object file, header, a class of C++, a test program with inputs and
        expected outputs, and a ``CMakeLists.txt``, which builds the library and runs the test;
        weights, if they are apart. For "wasm32" also a module that runs as it is, and a script of
        JavaScript that loads it. For "torch" ``name.pt2``, a package of AOTInductor, and
        ``name.so`` with its operators, which a program loads first; for processors like this one.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected; for a
            layer that is not among the above.

    Example:
        >>> import tempfile
        >>> import anycell.numpy as layers
        >>> model = [layers.LSTM(1, 20, seed=0), layers.Dense(20, 1, seed=1)]
        >>> [file.name for file in export(model, tempfile.mkdtemp())]
        ['model.c', 'model.h', 'model.hpp', 'model_test.c', 'CMakeLists.txt']
    """
    if target not in TARGETS:
        refuse("target", repr(target), f"one of {', '.join(TARGETS)}")
    if weights not in WEIGHTS:
        refuse("weights", repr(weights), f"one of {', '.join(WEIGHTS)}")
    fits = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name)
    if not fits or name in TAKEN:
        rule = "small letters, digits and _, and no word or header of C or C++"
        refuse("name", repr(name), f"a name that C accepts: {rule}")
    if target == "torch":
        if weights != "float32" or blob:
            refuse("weights, blob", f"{weights!r}, {blob}", "'float32', False with target='torch'")
        return _package(model, Path(out), name)
    platform = machine.PLATFORMS.get(target)
    passes = Model(_parts(model), 1 if platform is None else platform.lanes, weights, blob)
    files = _files(passes, platform, name)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return [folder / file for file in files]


def _package(program: Any, folder: Path, name: str) -> list[Path]:
    """Writes a program of ``torch.export`` as a package, and its layers as a library."""
    if "torch" not in sys.modules or not isinstance(program, _packaged().KIND):
        hint = "Call torch.export.export(model.eval(), inputs), and export what it returns."
        refuse("model", type(program).__name__, "an ExportedProgram for 'torch'", hint, TypeError)
    packaged, space = _packaged(), f"anycell_{name}"
    layers = packaged.operators_of(program, operators.Operator)
    folder.mkdir(parents=True, exist_ok=True)
    package, library = folder / f"{name}.pt2", folder / f"{name}.so"
    with tempfile.TemporaryDirectory(dir=folder) as place:
        # This process loads it: by another name than a library that it may have loaded before.
        new = Path(place) / library.name
        operators.write(layers, space, new, packaged.LIBRARIES)
        packaged.package(program, space, layers, new, package)
        new.replace(library)
    return [package, library]


def _packaged() -> Any:
    return importlib.import_module("anycell.torch.packaged")


def _parts(model: Any) -> Iterator[Part]:
    """The parts of a model, layer by layer."""
    if isinstance(model, (list, tuple)):
        for layer in model:
            yield from _parts(layer)
        return
    bases = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    for framework in ("keras", "torch", "numpy"):  # layers of Keras may be modules of torch
        if framework in bases or f"anycell.{framework}" in sys.modules:
            adapter = importlib.import_module(f"anycell.{framework}.exported")
            if isinstance(model, adapter.KINDS):
                yield from adapter.parts(model)
                return
    expected = "a layer or model of anycell.torch, anycell.keras or anycell.numpy, or a list"
    hint = "A program of torch.export takes target='torch'."
    refuse("model", type(model).__name__, expected, hint, TypeError)


def _files(model: Model, platform: machine.Platform | None, name: str) -> dict[str, bytes]:
    """The contents of the files, by their names."""
    orders = [Schedule(of_pass.program) for of_pass in model.passes]
    x = np.random.default_rng(0).standard_normal((STEPS, model.inputs)).astype(np.float32)
    tables = c.table("in", x) + "\n" + c.table("expected", model.run(x).astype(np.float32))
    sizes = {name: getattr(model, name) for name in ("inputs", "outputs", "state_size")}
    sizes["memory"] = sum(model.memory.values())
    matrices = [matrix for of_pass in model.passes for matrix in of_pass.program.matrices]
    # Where Python rounds to another integer than C, because sums have rounded differently before.
    tolerance = 1e-2 if any(matrix.scales is not None for matrix in matrices) else 1e-5
    process = "float *state, const float *in, float *out, size_t steps"
    process += ", float *memory" * model.whole
    library = f"{name}.c" if platform is None else f"{name}.o"
    filled: dict[str, dict[str, Any]] = {
        "model.h": sizes | {"version": VERSION, "anycell": installed(), "process": process},
        "model.hpp": {},
        "model_test.c": {"steps": STEPS, "tables": tables, "tolerance": tolerance},
        "CMakeLists.txt": {"library": library},
    }
    files = dict[str, bytes]()
    if platform is None:
        filled = {"model.c": c.texts(model, orders) | {"process": process}} | filled
    else:
        files[library] = code = machine.compiled(model, orders, platform, name)
        if platform.triple.startswith("wasm"):
            files[f"{name}.wasm"], end = wasm.runnable(code, machine.functions(model))
            kept = sum(sum(order.rooms.values()) for order in orders)
            filled["model.mjs"] = sizes | {"stack": padded(end + STACK + 4 * kept, 64)}
    if model.blob:
        for values in filled.values():
            values["size"] = len(model.blob.content)
    lines = {"whole": model.whole, "step": not model.whole, "blob": model.blob is not None}
    lines["embedded"] = not lines["blob"]
    for file, values in filled.items():
        text = c.template(file)
        for tag, kept in lines.items():
            whole = "" if kept else r".*\n"
            text = re.sub(rf"^#{tag} ?{whole}", "", text, flags=re.MULTILINE)
        text = text.replace("MODEL", name.upper()).replace("model", name)
        files[file.replace("model", name)] = c.filled(text, values).encode()
    if model.blob:
        files[f"{name}.bin"] = model.blob.file()
    return files
