"""Calls a kernel's door directly, without a layer."""

from array import array

import numpy as np

from anycell.engines import cpu
from anycell.layer.framework import extent
from anycell.numpy.framework import Array, Numpy


def packed(kernel: cpu.Kernel, weights: dict[str, Array], inputs: int = 0) -> tuple[Array, int]:
    """Returns memory in which a kernel has packed the weights of a direction, and the number of
    bytes that the kernel asked for; all bytes that it did not write are 0xAB.

    Args:
        weights: by name.
        inputs: the number of inputs that the kernel multiplies.
    """
    (dtype,) = {weight.dtype for weight in weights.values()}
    host, entries = Numpy(dtype), array("q", bytes(8 * kernel.first(1)))

    def fill(**values: int) -> None:
        for name, value in values.items():
            if name in kernel.shared:
                entries[kernel.shared[name]] = value

    # The call begins after the only step and has no rows, so the kernel only packs.
    fill(directions=1, steps=1, span=1, row_group=1, threads=1, begin=1, inputs=inputs, pack=1)
    fill(packed=1)
    kernel.needs(entries.buffer_info()[0])
    size = entries[kernel.shared["packed_bytes"]]
    memory, scratch = np.full(size + 8192, 0xAB, np.uint8), cpu.Block(1 << 16)
    start = -memory.ctypes.data % cpu.LINE
    address = memory.ctypes.data + start
    assert entries[kernel.shared["scratch_bytes"]] <= scratch.size
    fill(scratch=scratch.address, packed=address)
    bounds = {"packed": (address, address + size)}
    bounds["scratch"] = scratch.address, scratch.address + scratch.size
    for name, weight in weights.items():
        if name in kernel.each:
            at, axes = kernel.first(0) + kernel.each[name], kernel.axes.get(name, 0)
            entries[at] = host.pointer(weight)
            strides = host.strides(weight)[-axes:] if axes else ()
            last = at + 1 + axes
            entries[last - len(strides) : last] = array("q", strides)
    each = {name: extent(host, weight) for name, weight in weights.items()}
    if cpu.check.ON:
        cpu.check.check(kernel, entries, (bounds, [each]))
    kernel.door(entries.buffer_info()[0])
    return memory[start:], size
