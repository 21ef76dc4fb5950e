"""Layers as operators of PyTorch without Python: a shared library with the CPU engine's kernels.

An operator takes projected gates and packed weights, and calls the kernel's door. The numbers of a
call's table depend on the sizes of a call as ``fixed + by_row * rows + by_step * steps``, so that
rows of such numbers, printed as C, serve calls of any number of steps and rows.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell.engines import cpu
from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.sequence import print_kernel
from anycell.exporter.c import filled, template
from anycell.layer.checks import refuse
from anycell.layer.heuristics import WORTH_A_THREAD
from anycell.layer.signature import ENDS, FLAGS, learned
from anycell.layer.stream import pack
from anycell.numpy.framework import Numpy
from anycell.plan import CODES, Layer, Options, multiplies_input
from anycell.requirement import installed

STEPS, ROWS = "STEPS", "ROWS"  # sizes of a call
Size = int | str
Sizes = tuple[Size, ...]


class Entry(NamedTuple):
    """A number of a call's table, see ``operators.c``."""

    place: int
    base: int = -1
    fixed: int = 0
    by_row: int = 0
    by_step: int = 0


class Operator:
    """One layer as an operator.

    Args:
        name: of the operator, to which a digest is added.
        layer: with its plan and the names of its arrays.
        shapes: of x and, where there are some, of the states that resets restore.

    Attributes:
        arguments: the names of the tensors that a call takes, in order: the ``gates`` that each
            direction's weight_ih projects, or x; ``packed weights``; others of ``signature``.
        tensors: dtype and sizes of each tensor: arguments, results, and memory of a call.
        results: how many results there are: the output, and the final states.
        learned: the arrays that are packed, with their shapes.
        projects: whether the gates of x are computed outside, by the program.
    """

    def __init__(self, name: str, layer: Layer, shapes: Mapping[str, Sequence[int]]) -> None:
        self.layer, self.plan = layer, layer.plan
        self.kernel = cpu.compiled(self.plan)
        self.arguments, self.tensors = list[str](), list[tuple[str, Sizes]]()
        self.entries = list[Entry]()
        reverse, bytes_ = layer.options.reverse, self.plan.itemsize
        directions, ways = len(reverse), range(len(reverse))
        self.numbers = {
            "directions": directions, "reverse": sum(way << d for d, way in enumerate(reverse)),
            "threads": 1, "least_work": WORTH_A_THREAD, "row_group": 1,
        }  # fmt: skip
        self.numbers |= {n: codes[getattr(layer.options, n)] for n, codes in CODES.items()}
        for number, value in self.numbers.items():
            self._enter(number, fixed=value)
        for number in ("steps", "count", "span"):
            self._enter(number, by_step=1)
        self._enter("batch", by_row=1)

        def states(kind: str, name: str, tensor: int, size: int) -> None:
            for d in ways:
                self._enter(f"{kind} {name}", tensor, d, by_row=d * size * bytes_)
                self._enter(f"{kind} {name} rows", d=d, fixed=size)
                self._enter(f"{kind} {name} columns", d=d, fixed=1)

        self.width = shapes["x"][2]
        self.projects = "weight_ih" in layer.arrays and not multiplies_input(self.plan)
        if self.projects:
            width = self.plan.gates_width
            gates = [
                self._argument(f"gates weight_ih{end}", STEPS, ROWS, width)
                for end in ENDS[:directions]
            ]
        else:
            width = self.width
            gates = [self._argument("x", STEPS, ROWS, width)] * directions
        for d, tensor in enumerate(gates):
            self._enter("gates", tensor, d)
            self._enter("gates steps", d=d, by_row=width)
            self._enter("gates rows", d=d, fixed=width)
        self.learned = {
            one.name + end: one.shape
            for end in ENDS[:directions]
            for one in learned(self.plan, None if self.projects else width)
            if one.name + end in layer.arrays
        }
        zeros = {name: np.zeros(shape, self.plan.dtype) for name, shape in self.learned.items()}
        self.packed = self._argument("packed weights", self.pack(zeros).size, dtype="uint8")
        self._enter("packed", self.packed)
        flags = [flag for flag in FLAGS if flag in layer.arrays]
        self.flags = {flag: self._argument(flag, STEPS, ROWS, dtype="bool") for flag in flags}
        if "mask" in self.flags:
            self._enter("mask", self.flags["mask"])
        if "static" in layer.arrays:
            static = self._argument("static", ROWS, self.plan.static_width)
            for d in ways:
                self._enter("static", static, d)
        sizes = [(state.name, layer.size(state.size)) for state in layer.cell.states]
        for state, size in sizes:
            before, restored = f"state {state}", f"reset_state {state}"
            if before in layer.arrays:
                states("state", state, self._argument(before, directions, ROWS, size), size)
            if len(shapes.get(restored, ())) == 3:
                tensor = self._argument(restored, directions, ROWS, size)
                states("reset_state", state, tensor, size)
            elif "resets" in self.flags:
                tensor = self._argument(restored, directions, size)
                for d in ways:
                    self._enter(restored, tensor, d, fixed=d * size * bytes_)
                    self._enter(f"{restored} columns", d=d, fixed=1)
        for d, end in enumerate(ENDS[:directions]):
            for one in learned(self.plan, None):
                if len(one.shape) == 1 and one.name + end in layer.arrays:
                    self._enter(one.name, self._argument(one.name + end, *one.shape), d)

        (_, first), *others = sizes
        self._enter("out", self._tensor(STEPS, ROWS, directions * first))
        for state, size in sizes:
            states("final", state, self._tensor(directions, ROWS, size), size)
        self.results = 1 + len(sizes)
        # Two slots of each state, which take turns.
        self._enter("hidden", self._tensor("2", ROWS, directions * first))
        for (state, size), d in itertools.product(others, ways):
            self._enter(f"sequence {state}", self._tensor("2", ROWS, size), d)
        if "resets" in self.flags:
            for d in ways:
                self._enter("resets", self._tensor(STEPS, ROWS, dtype="uint8"), d)
        self._enter("hyper", len(self.tensors))
        # A package finds the operators of its own library only, whose weights are packed like this.
        self.kernel_text = str(print_kernel(Layout(self.plan, False, isa.current())))
        digest = hashlib.sha256(f"{self.kernel_text}{self.tensors}{self.entries}".encode())
        self.name = f"{name}_{digest.hexdigest()[:8]}"

    def _enter(
        self, name: str, base: int = -1, d: int = 0, fixed: int = 0, by_row: int = 0,
        by_step: int = 0,
    ) -> None:  # fmt: skip
        """Adds an entry, of the whole call or of direction d."""
        self.entries.append(Entry(self._place(name, d), base, fixed, by_row, by_step))

    def _place(self, name: str, d: int) -> int:
        shared, each = self.kernel.shared, self.kernel.each
        return shared[name] if name in shared else self.kernel.first(d) + each[name]

    def _tensor(self, *sizes: Size, dtype: str = "") -> int:
        self.tensors.append((dtype or self.plan.dtype, sizes))
        return len(self.tensors) - 1

    def _argument(self, name: str, *sizes: Size, dtype: str = "") -> int:
        self.arguments.append(name)
        return self._tensor(*sizes, dtype=dtype)

    def pack(self, arrays: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """The packed weights of arrays of NumPy, by the names of ``signature``."""
        learned = {name: arrays[name] for name in self.learned}
        host, options = Numpy.of(self.plan.dtype), Options(self.layer.options.reverse)
        block = pack(host, self.plan, learned, self.width, options)
        return block.memory[block.address - block.memory.ctypes.data :][: block.size]

    @property
    def schema(self) -> str:
        """The operator's name and types, as PyTorch reads them."""
        arguments = ", ".join(f"Tensor a{i}" for i in range(len(self.arguments)))
        return f"{self.name}({arguments}) -> ({', '.join(['Tensor'] * self.results)})"

    def text(self, k: int) -> str:
        """The operator as C, number k of a library."""
        kernel, directions = self.kernel, len(self.layer.options.reverse)
        hyper = cpu.hyperparameters(self.plan)
        forms = [
            _row(f"aoti_torch_dtype_{dtype}", len(sizes), _row(*sizes))
            for dtype, sizes in self.tensors
        ]
        places = kernel.shared["scratch"], kernel.shared["scratch_bytes"]
        numbers = len(self.arguments), self.results, len(self.tensors), len(self.entries), *places
        flags = (self.flags.get(name, -1) for name in FLAGS)
        of_layer = f"forms{k}", f"entries{k}", *numbers, self.packed, *flags, directions
        entries = map(_row, *zip(*self.entries, strict=True))
        functions = self.numbers["reverse"], f"hyper{k}", f"needs{k}", f"door{k}"
        return "\n".join([
            f"HIDDEN void needs{k}(Word *);",
            f"HIDDEN void door{k}(Word *);",
            f"static const uint{8 * hyper.itemsize}_t hyper{k}[] = "
            f"{_row(*hyper.view(f'u{hyper.itemsize}'))};",
            f"static const Form forms{k}[] = {_row(*forms)};",
            f"static const Entry entries{k}[] = {_row(*entries)};",
            f"static const Layer layer{k} = {_row(*of_layer, *functions)};",
            f"static void call{k}(uint64_t *stack, uint64_t arguments, uint64_t results) {{",
            f"    call(&layer{k}, stack);",
            "}",
        ])  # fmt: skip


def _row(*values: object) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def write(operators: Sequence[Operator], space: str, path: Path, libraries: Path) -> None:
    """Writes a shared library, which registers operators under the name ``space``.

    Args:
        libraries: the folder of PyTorch's own libraries.
    """
    tables = max(op.kernel.first(len(op.layer.options.reverse)) for op in operators)
    begin = [
        f'    aoti_torch_library_def(definitions, "{op.schema}");\n'
        f'    aoti_torch_library_impl(kernels, "{op.name}", call{k});'
        for k, op in enumerate(operators)
    ]
    values = {
        "space": space, "anycell": installed(), "words": tables,
        "most": 1 + max(len(op.tensors) for op in operators),
        "layers": "\n".join(op.text(k) for k, op in enumerate(operators)),
        "begin": "\n".join(begin),
    }  # fmt: skip
    source = filled(template("operators.c"), values)
    target, compiler = isa.current(), os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "operators.c"]
        files[0].write_text(source, encoding="utf-8")
        for k, operator in enumerate(operators):
            files.append(Path(folder) / f"kernel{k}.o")
            with jit.lock:
                functions = f"door{k}", f"needs{k}"
                text = operator.kernel_text
                for name, numbered in zip(("door", "needs"), functions, strict=True):
                    text = text.replace(f"@{name}(", f"@{numbered}(")
                files[-1].write_bytes(jit.object_code(text, functions, target))
        command = [*shlex.split(compiler), "-shared", "-fPIC", "-O2", *map(str, files)]
        command += ["-o", str(path), f"-L{libraries}", "-ltorch_cpu"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            refuse("target", "'torch'", "a C compiler to link the library with", f"Set CC. {error}")
        if done.returncode:
            raise RuntimeError(f"anycell: {compiler!r} does not link the operators:\n{done.stderr}")
