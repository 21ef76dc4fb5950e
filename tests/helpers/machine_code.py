"""Compiles kernels of tier 2 for an H100 and prints their machine code as JSON; needs no card.

    python tests/helpers/machine_code.py 256 forward 768 backward

This is a script, because the tests of the GPU engine make Triton interpret kernels.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from anycell import cells
from anycell.engines.gpu import build, capacity, print_whole
from anycell.engines.gpu.text import Variant
from anycell.plan import plan


def code(hidden: int, way: str) -> str:
    """Returns the machine code of the LSTM with 16 rows in bfloat16."""
    one = plan(cells.LSTM, hidden, "bfloat16", "gpu")
    card = next(d for d in capacity.DEVICES if d.name == "H100")
    backward = way == "backward"
    choice = capacity.choose(one, card, backward)
    assert choice.tier == 2
    form = Variant.training(cells.LSTM, backward, input_bias=not backward)
    kernel = print_whole(one, form, choice)
    numbers = frozenset(name for name, kind in kernel.arguments if kind != "i32")
    cubin = build.binary(kernel, card.capability, numbers).cubin
    assert build.spilled(cubin) <= build.MOST_SPILLED
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    kernels = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    print(json.dumps([code(int(hidden), way) for hidden, way in kernels]))
