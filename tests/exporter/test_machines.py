"""Exported programs on machines that this one imitates: their test programs run in QEMU.

Cross-compilers and QEMU: ``apt-get install qemu-user qemu-system-arm gcc-aarch64-linux-gnu
gcc-riscv64-linux-gnu gcc-arm-linux-gnueabihf gcc-arm-none-eabi libnewlib-arm-none-eabi``.
"""

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from exported import CC, EVERY, FURTHER, HERE, decaying, perturbed, sizes_of

import anycell
from anycell import Cell, cells
from anycell.numpy import RNN
from tests.project.test_docs import blocks

pytestmark = pytest.mark.sample(every=5)

# A board without a system: its stack, and where it starts. Floats work once they are switched on.
START = """
void _start(void);
static void reset(void) {
    *(volatile unsigned *)0xE000ED88u |= 0xFu << 20;
    __asm__ volatile("dsb\\n isb");
    _start();
}
__attribute__((section(".vectors"), used))
static void (*const vectors[])(void) = {(void (*)(void))0x20010000, reset};
"""
BOARD = ["-mthumb", "-mfloat-abi=hard", "--specs=rdimon.specs", "-Wl,--section-start=.vectors=0"]
SEMIHOSTING = ["-nographic", "-semihosting-config", "enable=on,target=native", "-kernel"]


class Machine(NamedTuple):
    """How programs for a machine are compiled and run."""

    compiler: list[str]
    emulator: list[str]


MACHINES = {
    "aarch64": Machine(["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"]),
    "riscv64": Machine(["riscv64-linux-gnu-gcc", "-static"], ["qemu-riscv64"]),
    "armv7": Machine(["arm-linux-gnueabihf-gcc", "-static"], ["qemu-arm"]),
    "cortex-m4": Machine(
        ["arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mfpu=fpv4-sp-d16", *BOARD],
        ["qemu-system-arm", "-M", "mps2-an386", *SEMIHOSTING],
    ),
    "cortex-m55": Machine(
        ["arm-none-eabi-gcc", "-mcpu=cortex-m55", *BOARD],
        ["qemu-system-arm", "-M", "mps3-an547", *SEMIHOSTING],
    ),
    **{target: Machine(["gcc"], []) for target in HERE},
}
machines = pytest.mark.parametrize("machine", MACHINES)


def said(
    model: Any, machine: str, folder: Path, main: str = "", *, source: bool = False, **options: Any
) -> str:
    """What a program on a machine prints, which ends without an error.

    Args:
        main: the text of the program; none is the test program of the model.
        source: whether the model is compiled from C.
    """
    compiler, emulator = MACHINES[machine]
    for tool in (compiler[0], *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}; the head of {Path(__file__).name} says how to install it")
    target = "c" if source else machine
    library, *_ = anycell.export(model, folder, target=target, name="net", **options)
    files = [library.name, "net_test.c"]
    if main:
        files[1] = "main.c"
        (folder / "main.c").write_text(main, encoding="utf-8")
    if "arm-none-eabi-gcc" in compiler:
        files.append("start.c")
        (folder / "start.c").write_text(START, encoding="utf-8")
    for command in [*compiler, *CC[1:], *files, "-lm", "-o", "main"], [*emulator, "./main"]:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@machines
@pytest.mark.parametrize("cell", [*EVERY, *FURTHER], ids=repr)
@pytest.mark.sample(len(MACHINES))
def test_every_cell(cell: Cell, machine: str, tmp_path: Path, rng: np.random.Generator) -> None:
    layer = perturbed(RNN(cell, 3, 6, num_layers=2, dtype="float64", **sizes_of(cell)), rng)
    (error,) = re.findall(r"largest error: (\S+)", said(layer, machine, tmp_path))
    assert float(error) < (1e-6 if cell in EVERY else 1e-5)


@machines
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.sample(every=4)
def test_narrow_weights(weights: str, machine: str, tmp_path: Path) -> None:
    """The machine rounds as the others do."""
    layer = RNN(cells.LSTMP, 3, 6, num_layers=2, bidirectional=True, seed=0, P=5)
    if weights == "int8":
        layer, weights = anycell.compress.quantize(layer), "float32"
    (error,) = re.findall(r": (\S+)", said(layer, machine, tmp_path, weights=weights, blob=True))
    assert float(error) < 1e-6


SILENCE = """
#include "net.h"
#include <stdio.h>

static int small(float x) { return x != 0.0f && x < 1.1754943e-38f && x > -1.1754943e-38f; }

int main(void) {
    float state[NET_STATE_SIZE], in[1] = {1.0f}, out[NET_OUTPUTS], first, last = 0.0f;
    volatile float before = 3e-39f, after;
    int denormal = 0;
    net_reset(state);
    net_step(state, in, out);
    first = out[0];
    in[0] = 0.0f;
    for (int t = 0; t < 400; t++) {
        if (t % 2) net_process(state, in, out, 1);
        else net_step(state, in, out);
        for (int j = 0; j < NET_OUTPUTS; j++) denormal += small(out[j]), last = out[j];
    }
    after = before / 2;
    printf("%d %d %d %d", first > 1e-3f || first < -1e-3f, last == 0.0f, denormal, after > 0.0f);
    return 0;
}
"""


@pytest.mark.parametrize("source", [False, True])
@machines
def test_denormal_numbers_do_not_outlive_a_call(source: bool, machine: str, tmp_path: Path) -> None:
    """A decaying state becomes 0, and the caller's mode stays."""
    if machine == "riscv64":
        pytest.skip("RISC-V has no such mode")
    assert said(decaying(), machine, tmp_path, SILENCE, source=source) == "1 1 0 1"


SKETCH = """
#include <stdio.h>

static const float series[] = {%s};
static int day;
float measured(void) { return series[day++]; }
void show(float forecast) { printf("%%.7g\\n", forecast); }

int main(void) {
    setup();
    while (day < (int)(sizeof series / sizeof *series)) loop();
    return 0;
}
"""


@machines
@pytest.mark.sample(every=4)
def test_the_sketch_of_the_guide(
    machine: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the forecaster of the demo, trained a little: what it says of the next week."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend("examples")
    demo = runpy.run_path("examples/demo.py")
    model = demo["models"]("numpy", 16)[1].model
    weeks = np.arange(2 * demo["YEAR"], dtype=np.float32)
    x = np.sin(weeks / 8.0)[None, :, None] + 0.1 * rng.standard_normal((4, len(weeks), 1))
    target = np.zeros((4, demo["YEAR"], demo["YEAR"]), np.float32)
    for _ in range(3):
        model.fit(x.astype(np.float32), target)
    seen = x[0, :, 0].astype(np.float32)
    _, sketch = blocks("docs/guides/deploying.md", "c")
    main = sketch + SKETCH % ", ".join(f"{value:.9e}f" for value in seen.tolist())
    shown = said([model.layer, model.readout], machine, tmp_path, main).split()
    expected = model.predict(seen[None, :, None])[0, :, 0]
    assert np.allclose(np.array(shown, float)[-demo["YEAR"] :], expected, atol=1e-5)
