"""``export``: a trained model as a program without Python."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anycell.exporter import c, machine
from anycell.exporter.program import Part, Program
from anycell.exporter.schedule import schedule
from anycell.layer.checks import refuse
from anycell.layer.view import FedBack
from anycell.requirement import installed

TARGETS = ("c", *machine.PLATFORMS)
VERSION = 1  # of the functions in the header
STEPS = 32  # of the test vector


def export(
    model: Any, out: str | os.PathLike[str], *, target: str = "c", name: str = "model"
) -> list[Path]:
    """Writes a trained model as a C library: the computation and the weights, and nothing else.

    The library computes one row in float32, sample by sample or block by block. It allocates
    nothing, takes no locks, has no variables of its own, and as source calls nothing but functions
    of ``math.h``, as machine code nothing at all: it may run in an audio callback or on a
    microcontroller. The caller owns the state::

        float state[MODEL_STATE_SIZE];
        model_reset(state);
        model_step(state, in, out);             /* MODEL_INPUTS numbers to MODEL_OUTPUTS numbers */
        model_process(state, in, out, steps);   /* the same for each of these steps */

    Args:
        model: a layer of ``anycell.torch``, ``anycell.keras`` or ``anycell.numpy`` of any cell,
            also stacked, or ``Feedback``; an ``nn.Sequential`` or ``keras.Sequential`` of such
            layers, linear layers, layer norms and activations; or a list of them, in order. The
            output of a recurrent layer goes to the next layer at every step. A cell's static input
            is appended to each sample, and for ``Feedback`` a number that is 1 where a step is not
            forced (the series must be 0 there), else 0.
        out: a folder, which is made if there is none. Files of the same names are replaced.
        target: "c" for C99 source, or a machine for an object file: "x86-64", "x86-64-avx2",
            "x86-64-avx512", "aarch64" and "riscv64" of Linux; "x86-64-macos", "aarch64-macos",
            "x86-64-windows", "aarch64-windows"; "armv7", "cortex-m4", "cortex-m55"; "wasm32".
        name: of the files, and what names in the header begin with.

    Returns:
        the files: source or object file, header, a test program with inputs and expected outputs,
        and a ``CMakeLists.txt``, which builds the library and runs the test.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected; for a
            layer that is not among the above, one that runs in reverse, or weights of 8 bits.

    Example:
        >>> import tempfile
        >>> import anycell.numpy as layers
        >>> model = [layers.LSTM(1, 20, seed=0), layers.Dense(20, 1, seed=1)]
        >>> [file.name for file in export(model, tempfile.mkdtemp())]
        ['model.c', 'model.h', 'model_test.c', 'CMakeLists.txt']
    """
    if target not in TARGETS:
        refuse("target", repr(target), f"one of {', '.join(TARGETS)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        expected = "a name that C accepts, in lower case: letters, digits and _"
        refuse("name", repr(name), expected)
    platform = machine.PLATFORMS.get(target)
    program = Program(_parts(model), 1 if platform is None else platform.lanes)
    order = schedule(program)
    library = f"{name}.c" if platform is None else f"{name}.o"
    if platform is None:
        code = c.source(program, order, name).encode()
    else:
        code = machine.compiled(program, order, platform, name)
    files = {
        library: code,
        f"{name}.h": _header(program, name).encode(),
        f"{name}_test.c": _test(program, name).encode(),
        "CMakeLists.txt": CMAKE.format(name=name, library=library).encode(),
    }
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return [folder / file for file in files]


def _parts(model: Any) -> Iterator[Part | FedBack]:
    """What a model computes, layer by layer."""
    if isinstance(model, (list, tuple)):
        for layer in model:
            yield from _parts(layer)
        return
    for framework in ("keras", "torch", "numpy"):  # layers of Keras may be modules of torch
        if f"anycell.{framework}" in sys.modules:
            adapter = importlib.import_module(f"anycell.{framework}.exported")
            if isinstance(model, adapter.KINDS):
                yield from adapter.parts(model)
                return
    expected = "a layer or model of anycell.torch, anycell.keras or anycell.numpy, or a list"
    refuse("model", type(model).__name__, expected, "See anycell.export.", TypeError)


def _header(program: Program, name: str) -> str:
    sizes = {"VERSION": VERSION, "INPUTS": program.inputs, "OUTPUTS": program.outputs,
             "STATE_SIZE": program.state_size or 1}  # fmt: skip
    defined = "\n".join(f"#define {name.upper()}_{key} {size}" for key, size in sizes.items())
    return HEADER.format(name=name, upper=name.upper(), defined=defined, anycell=installed())


def _test(program: Program, name: str) -> str:
    x = np.random.default_rng(0).standard_normal((STEPS, program.inputs)).astype(np.float32)
    tables = c.table("in", x), c.table("expected", program.run(x).astype(np.float32))
    return TEST.format(name=name, upper=name.upper(), tables="\n".join(tables), steps=STEPS)


HEADER = """\
/* {name}, written by anycell {anycell}. Arrays are float, one sample after the other. */
#ifndef {upper}_H
#define {upper}_H

#include <stddef.h>

{defined}

#ifdef __cplusplus
extern "C" {{
#endif

/* {upper}_VERSION of the library, to compare with this header's. */
int {name}_version(void);

/* Bytes of a state, of {upper}_STATE_SIZE numbers. */
size_t {name}_state_size(void);

/* Begins a sequence. */
void {name}_reset(float *state);

/* Runs one step: from {upper}_INPUTS to {upper}_OUTPUTS numbers, which may not overlap. */
void {name}_step(float *state, const float *in, float *out);

/* Runs many steps. */
void {name}_process(float *state, const float *in, float *out, size_t steps);

#ifdef __cplusplus
}}
#endif
#endif
"""
TEST = """\
/* Runs {name} on random inputs, and compares with what Python computed. */
#include "{name}.h"
#include <math.h>
#include <stdio.h>

{tables}

static float largest(const float *out) {{
    float error = 0.0f;
    for (int i = 0; i < {steps} * {upper}_OUTPUTS; i++)
        error = fmaxf(error, fabsf(out[i] - expected[i]) / (1.0f + fabsf(expected[i])));
    return error;
}}

int main(void) {{
    static float state[{upper}_STATE_SIZE], out[{steps} * {upper}_OUTPUTS];
    {name}_reset(state);
    {name}_process(state, in, out, {steps});
    float error = largest(out);
    {name}_reset(state);
    for (int t = 0; t < {steps}; t++)
        {name}_step(state, in + t * {upper}_INPUTS, out + t * {upper}_OUTPUTS);
    error = fmaxf(error, largest(out));
    printf("largest error: %g\\n", error);
    return {name}_version() != {upper}_VERSION || !(error < 1e-5f);
}}
"""
CMAKE = """\
cmake_minimum_required(VERSION 3.10)
project({name} C)
set(CMAKE_C_STANDARD 99)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
add_library({name} STATIC {library})
set_target_properties({name} PROPERTIES LINKER_LANGUAGE C)
target_include_directories({name} PUBLIC ${{CMAKE_CURRENT_SOURCE_DIR}})
if(NOT MSVC)
  target_compile_options({name} PRIVATE -O3 -fno-math-errno -fno-trapping-math)
  target_link_libraries({name} PUBLIC m)
endif()
enable_testing()
add_executable({name}_test {name}_test.c)
target_link_libraries({name}_test {name})
add_test({name} {name}_test)
"""
