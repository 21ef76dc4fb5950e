"""The door needs no Python: a C program and XLA call it, and get the bits that a layer gets."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import python
from tolerances import assert_close

from anycell import cells, layer
from anycell.engines import cpu
from anycell.engines.cpu import ir, isa, jit
from anycell.engines.cpu.image import SUPPORTED, link
from anycell.engines.cpu.kernel import request
from anycell.engines.cpu.layout import Layout
from anycell.numpy.host import NumpyHost
from anycell.plan import Plan, plan

STEPS, ROWS, UNITS = 7, 5, 20
Array = np.ndarray


def lstm() -> Plan:
    return plan(cells.LSTM, UNITS, "float32")


def problem(rng: np.random.Generator) -> dict[str, Array]:
    """The arrays of a call, its input projected."""
    shapes = {"x": (STEPS, ROWS, 4 * UNITS), "weight_hh": (4 * UNITS, UNITS)}
    shapes |= {"bias_hh": (4 * UNITS,), "state h": (1, ROWS, UNITS), "state c": (1, ROWS, UNITS)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def entries_of(kernel: cpu.Kernel) -> array[int]:
    """The table of a call of one direction, with all but its arrays, and with what it needs."""
    entries = array("q", bytes(8 * kernel.first(1)))
    numbers = {"directions": 1, "steps": STEPS, "batch": ROWS, "count": STEPS, "span": STEPS}
    for name, value in {**numbers, "pack": 1, "threads": 1, "row_group": 1, "packed": 1}.items():
        entries[kernel.shared[name]] = value
    kernel.needs(entries.buffer_info()[0])
    return entries


def test_a_kernel_refers_to_nothing_outside_itself() -> None:
    """Or a second process would have to load LLVM."""
    if not SUPPORTED:
        pytest.skip("the loader is for Linux on x86-64")
    for backward in (False, True):
        cpu.compiled(lstm(), backward)
        code = jit.stored(*request(Layout(lstm(), backward, isa.current())))
        assert code is not None and link(code) is not None


# -- C ---------------------------------------------------------------------------------------------
PROGRAM = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include "door.h"
enum { T = %d, B = %d, H = %d };
static float gates[T * B * 4 * H], weight[4 * H * H], bias[4 * H], h0[B * H], c0[B * H];
static float hidden[(T + 1) * B * H], cell[2 * B * H], h[B * H], c[B * H];
static int64_t call[ENTRIES];

static int64_t memory(int64_t bytes) { return (int64_t)aligned_alloc(64, bytes + 63 & ~63); }

static void matrix(int entry, float *array) {
    call[entry] = (int64_t)array, call[entry + 1] = H, call[entry + 2] = 1;
}

int main(void) {
    fread(gates, sizeof gates, 1, stdin), fread(weight, sizeof weight, 1, stdin);
    fread(bias, sizeof bias, 1, stdin);
    fread(h0, sizeof h0, 1, stdin), fread(c0, sizeof c0, 1, stdin);
    call[DIRECTIONS] = call[THREADS] = call[ROW_GROUP] = call[PACK] = call[PACKED] = 1;
    call[STEPS] = call[COUNT] = call[SPAN] = T, call[BATCH] = B, call[WHOLE] = 1;
    call[HIDDEN] = (int64_t)hidden, call[SEQUENCE_C] = (int64_t)cell;
    call[WEIGHT_HH] = (int64_t)weight, call[WEIGHT_HH_ROWS] = H, call[WEIGHT_HH_COLUMNS] = 1;
    call[BIAS_HH] = (int64_t)bias, call[GATES] = (int64_t)gates;
    call[GATES_STEPS] = B * 4 * H, call[GATES_ROWS] = 4 * H;
    matrix(STATE_H, h0), matrix(STATE_C, c0), matrix(FINAL_H, h), matrix(FINAL_C, c);
    needs(call);
    call[SCRATCH] = memory(call[SCRATCH_BYTES]), call[PACKED] = memory(call[PACKED_BYTES]);
    door(call);
    fwrite(hidden + B * H, sizeof(float), T * B * H, stdout);
    fwrite(h, sizeof h, 1, stdout), fwrite(c, sizeof c, 1, stdout);
}
"""


def places(kernel: cpu.Kernel) -> dict[str, int]:
    """Of a table's entries, for one direction."""
    return {**kernel.shared, **{n: kernel.first(0) + i for n, i in kernel.each.items()}}


def header(kernel: cpu.Kernel) -> str:
    """The places of a table's entries, for C."""
    named = [f"{n.upper().replace(' ', '_')} = {place}" for n, place in places(kernel).items()]
    functions = "void needs(int64_t *call), door(int64_t *call);"
    return f"enum {{ {', '.join(named)}, ENTRIES = {kernel.first(1)} }};\n{functions}\n"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc")
def test_a_c_program(rng: np.random.Generator, tmp_path: Path) -> None:
    arrays, kernel = problem(rng), cpu.compiled(lstm())
    code = jit.stored(*request(Layout(lstm(), False, isa.current())))
    assert code is not None
    (tmp_path / "kernel.o").write_bytes(code)
    (tmp_path / "door.h").write_text(header(kernel))
    (tmp_path / "main.c").write_text(PROGRAM % (STEPS, ROWS, UNITS))
    subprocess.run(["gcc", "-w", "main.c", "kernel.o", "-o", "main"], cwd=tmp_path, check=True)
    given = b"".join(np.ascontiguousarray(value).tobytes() for value in arrays.values())
    said = subprocess.run([tmp_path / "main"], input=given, capture_output=True, check=True).stdout
    output, finals, _ = layer.forward(
        NumpyHost("float32"), lstm(), arrays, layer.Options(), keep=False
    )
    assert said == b"".join(np.ascontiguousarray(value).tobytes() for value in (output, *finals))


# -- XLA -------------------------------------------------------------------------------------------


def handler(
    kernel: cpu.Kernel, entries: array[int], arguments: list[str], results: list[str]
) -> Any:
    """An XLA handler that fills a table with the addresses of its buffers, and calls the door."""
    module = ir.Module(isa.TARGETS["generic"])
    b = module.function("handler", "ptr frame", "ptr")
    (frame,), null = b.args, ir.Value("null", "ptr")

    def at(address: int) -> ir.Value:
        return ir.Value(f"inttoptr (i64 {address} to ptr)", "ptr")

    def word(base: ir.Value, offset: int, type: str = "ptr") -> ir.Value:
        return b.load(b.gep(base, offset, "i8"), type)

    # Where XLA's call frame has its extension, and the buffers of arguments and of results; and a
    # buffer its address. In an extension that asks for it: the metadata, and in these the version.
    with b.when(word(frame, 8, "i64").ne(0)):
        metadata = word(word(frame, 8), 24)
        for offset, number in ((24, 0), (28, 1), (32, 0)):
            b.store(ir.constant(number, "i32"), b.gep(metadata, offset, "i8"))
        b.ret(null)
    call, template = b.alloca("i64", len(entries)), at(entries.buffer_info()[0])
    with b.loop(0, len(entries)) as i:
        b.store(b.load(b.gep(template, i, "i64"), "i64"), b.gep(call, i, "i64"))
    for offset, names in ((72, arguments), (112, results)):
        for number, name in enumerate(names):
            align = cpu.LINE if name in ("scratch", "packed") else 1
            address = word(word(word(frame, offset), 8 * number), 24, "i64")
            place = b.gep(call, places(kernel)[name], "i64")
            b.store(address + (align - 1) & -align, place)
    b.call(at(ctypes.cast(kernel.door, ctypes.c_void_p).value or 0), call, returns="void")
    b.ret(null)
    import jax

    code = jit.compile(str(module), ["handler"], module.target)
    return jax.ffi.pycapsule(ctypes.c_void_p(code.address("handler")))


def under_xla() -> None:
    """The LSTM forward and backward within ``jax.jit``, beside another thread of Python's."""
    import jax
    import jax.numpy as jnp

    one, host, options = lstm(), NumpyHost("float32"), layer.Options()
    arrays = problem(np.random.default_rng(0))
    forward, backward = cpu.compiled(one), cpu.compiled(one, True)
    tables = entries_of(forward), entries_of(backward)
    forward_table, backward_table = tables

    def stride(kernel: cpu.Kernel, entries: array[int], name: str, *strides: int) -> None:
        at = kernel.first(0) + kernel.each[name] + 1
        entries[at : at + len(strides)] = array("q", strides)

    for kernel, entries in ((forward, forward_table), (backward, backward_table)):
        stride(kernel, entries, "weight_hh", 0, UNITS, 1)
    forward_table[forward.shared["whole"]] = 0b11
    for name in ("state h", "state c", "final h", "final c"):
        stride(forward, forward_table, name, UNITS, 1)
    stride(forward, forward_table, "gates", ROWS * 4 * UNITS, 4 * UNITS)
    stride(backward, backward_table, "d_gates", ROWS * 4 * UNITS, 4 * UNITS)
    for name in ("d_final h", "d_final c"):
        stride(backward, backward_table, name, UNITS, 1)
    at = backward.shared["d_output"] + 1
    backward_table[at], backward_table[at + 1] = ROWS * UNITS, UNITS

    def memory(kernel: cpu.Kernel, entries: array[int]) -> dict[str, Any]:
        sizes = {name: entries[kernel.shared[f"{name}_bytes"]] for name in ("scratch", "packed")}
        return {n: jax.ShapeDtypeStruct((size + 63,), jnp.uint8) for n, size in sizes.items()}

    def shape(*axes: int) -> Any:
        return jax.ShapeDtypeStruct(axes, jnp.float32)

    state = shape(ROWS, UNITS)
    kept = {"hidden": shape(STEPS + 1, ROWS, UNITS), "sequence c": shape(STEPS + 1, ROWS, UNITS)}
    kept["saved"] = shape(STEPS, ROWS, forward.plan.saved_stride)
    results = {**kept, "final h": state, "final c": state, **memory(forward, forward_table)}
    gradients = {"d_gates": shape(STEPS, ROWS, 4 * UNITS), "d_state h": state, "d_state c": state}
    gradients |= memory(backward, backward_table)
    entering = ["gates", "weight_hh", "bias_hh", "state h", "state c"]
    arriving = ["weight_hh", *kept, "d_output", "d_final h", "d_final c"]
    register = jax.ffi.register_ffi_target
    target = handler(forward, forward_table, entering, list(results))
    register("lstm_forward", target, platform="cpu")
    target = handler(backward, backward_table, arriving, list(gradients))
    register("lstm_backward", target, platform="cpu")

    def run(*given: Any) -> Any:
        call = jax.ffi.ffi_call("lstm_forward", tuple(results.values()))
        return dict(zip(results, call(*given), strict=True))

    @jax.custom_vjp
    def recurrence(*given: Any) -> Any:
        found = run(*given)
        return found["hidden"][1:], found["final h"], found["final c"]

    def save(*given: Any) -> Any:
        found = run(*given)
        outputs = found["hidden"][1:], found["final h"], found["final c"]
        return outputs, (given[1], *[found[name] for name in kept])

    def pull(saved: Any, d: Any) -> Any:
        call = jax.ffi.ffi_call("lstm_backward", tuple(gradients.values()))
        d_gates, d_h, d_c, *_ = call(*saved, *d)
        flat, hidden = d_gates.reshape(-1, 4 * UNITS), saved[1][:-1].reshape(-1, UNITS)
        return d_gates, flat.T @ hidden, flat.sum(0), d_h, d_c

    recurrence.defvjp(save, pull)
    d = [np.cos(np.arange(n, dtype=np.float32)) for n in (STEPS * ROWS * UNITS, ROWS * UNITS)]
    d_output, d_state = d[0].reshape(STEPS, ROWS, UNITS), d[1].reshape(ROWS, UNITS)

    @jax.jit
    def both(*given: Any) -> Any:
        outputs, pullback = jax.vjp(recurrence, *given)
        return outputs, pullback((d_output, d_state, d_state))

    given = [
        jnp.asarray(value[0] if n.startswith("state") else value) for n, value in arrays.items()
    ]
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(20):
            outputs, pulled = jax.block_until_ready(both(*given))
    finally:
        done.set()
        thread.join()
    assert turns > 0
    options = layer.Options()
    output, finals, saved = layer.forward(host, one, arrays, options, keep=True)
    assert saved is not None
    expected = layer.backward(
        host, one, arrays, options, saved, d_output, [d_state[None], d_state[None]]
    )
    for ours, theirs in zip(outputs, (output, *[f[0] for f in finals]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    names = "x", "weight_hh", "bias_hh", "state h", "state c"
    for name, ours in zip(names, pulled, strict=True):
        theirs = expected[name][0] if name.startswith("state") else expected[name]
        if name in ("weight_hh", "bias_hh"):  # XLA's own matmul and sum
            assert_close(np.asarray(ours), theirs, "float32", "gradient", name)
        else:
            np.testing.assert_array_equal(ours, theirs)
    print("right")


@pytest.mark.slow
def test_under_xla() -> None:
    pytest.importorskip("jax")
    assert "right" in python("import test_door; test_door.under_xla()", JAX_PLATFORMS="cpu")
