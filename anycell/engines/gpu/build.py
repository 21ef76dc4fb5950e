"""From text to kernels: files, Triton, cubins.

Triton reads a kernel's source from its file, so texts are written to the user's cache directory
(``$ANYCELL_CACHE_DIR/triton``), where they can be read, and stepped through in the interpreter.
What runs is the text printed here, never what a file happens to hold.

Triton is imported here, when the first kernel is built; with ``TRITON_INTERPRET=1`` kernels run in
its interpreter, on arrays of PyTorch on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anycell.engines.cpu.jit import cache_directory, enabled
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.text import Printed

# Arguments that Triton adds at the end of each kernel: scratch memory, and that of its profiler.
TRITONS_OWN = 2
REGISTERS, MOST_REGISTERS = 1 << 16, 255  # of a multiprocessor, of a thread
MOST_SPILLED = 64  # bytes of a thread, of a kernel that loops over time: each step pays for them


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for one kind of device.

    Attributes:
        symbol: its name in the cubin.
        cubin, ptx: machine code, and the text before it.
        shared: bytes of shared memory.
        warps: of 32 threads.
        spilled: bytes that a thread keeps in memory for want of registers.
    """

    symbol: str
    cubin: bytes
    ptx: str
    shared: int
    warps: int
    spilled: int

    def misfit(self, shared: int) -> str | None:
        """Why the kernel does not fit on a device with so many bytes of shared memory."""
        if self.shared > shared:
            return f"it takes {self.shared:,} bytes of shared memory, of which there are {shared:,}"
        if self.spilled > MOST_SPILLED:
            return f"registers do not suffice: each thread keeps {self.spilled:,} bytes in memory"
        return None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache(maxsize=4096)
def function(printed: Printed) -> Any:
    """The Triton function of a printed kernel."""
    path = _written(printed)
    names: dict[str, Any] = {"__name__": f"anycell_{printed.name}", "__file__": path}
    exec(compile(printed.source, path, "exec"), names)
    return names[printed.name]


def _written(printed: Printed) -> str:
    """The file with the text."""
    directory = os.path.join(cache_directory(), "triton")
    try:
        if not enabled():
            raise PermissionError("the user wants none")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.stat(directory)
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            raise PermissionError("others can write it")
        return _put(directory, printed)
    except OSError:
        return _put(_private(), printed)


def _put(directory: str, printed: Printed) -> str:
    """Writes the text to a file of this directory, whole or not at all."""
    key = hashlib.sha256(printed.source.encode()).hexdigest()[:16]
    path = os.path.join(directory, f"{printed.name}_{key}.py")
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise FileExistsError(f"{path} is not a file of ours")
    draft = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(printed.source)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return path


@functools.cache
def _private() -> str:
    """Where the cache directory cannot be used, or others can write it."""
    return tempfile.mkdtemp(prefix="anycell-triton-")


@functools.lru_cache(maxsize=4096)
def binary(printed: Printed, capability: int, aligned: frozenset[str] = frozenset()) -> Binary:
    """Machine code, compiled without a device; Triton keeps it on disk.

    Args:
        printed: the kernel.
        capability: of the device, 90 for an H100.
        aligned: arguments, addresses or strides, that 16 divides.

    Raises:
        Refused: where Triton does not compile it.
    """
    # The assembler saves registers so that two programs fit on a multiprocessor: it does not know
    # how much shared memory one takes. A cooperative kernel is told of all registers at once: to
    # save some it would load what others have written a part at a time, and wait for each.
    most = min(MOST_REGISTERS, REGISTERS // (32 * printed.warps))
    limits = (most, None) if printed.cooperative else (None, most)
    made = _made(printed, capability, aligned, limits[0])
    spills = spilled(made.asm["cubin"]) if printed.alone else 0
    if spills:
        # The one spills a little to save registers, the other since it keeps weights in them; but
        # hardly ever both.
        again = _made(printed, capability, aligned, limits[1])
        spills_again = spilled(again.asm["cubin"])
        if spills_again < spills:
            made, spills = again, spills_again
    return Binary(
        made.metadata.name,
        made.asm["cubin"],
        made.asm["ptx"],
        made.metadata.shared,
        made.metadata.num_warps,
        spills,
    )


def _made(printed: Printed, capability: int, aligned: frozenset[str], registers: int | None) -> Any:
    """What Triton makes of a kernel, whose threads may have so many registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {name: k for k, name in enumerate(dict(printed.arguments))}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function(printed), dict(printed.arguments), attrs=attributes)
    options: dict[str, Any] = {"num_warps": printed.warps, "num_stages": 1}
    options |= {"enable_fp_fusion": True, "sanitize_overflow": False, "maxnreg": registers}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # its own, the assembler's, LLVM's: there is no common class
        said = (str(error) or type(error).__name__).strip().splitlines()[-1]
        why = f"Triton {triton.__version__} does not compile it for sm_{capability}: {said}"
        raise Refused(printed, why) from error
    if made.metadata.global_scratch_size or made.metadata.profile_scratch_size:
        raise NotImplementedError(f"kernel {printed.name} asks for scratch memory of Triton's")
    declared = made.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0].count(".param")
    if declared != len(printed.arguments) + TRITONS_OWN:
        raise NotImplementedError(
            f"kernel {printed.name} takes {declared} arguments; expected "
            f"{len(printed.arguments)} and {TRITONS_OWN} of Triton's own, as in Triton 3.7 to 3.9. "
            f"This is Triton {triton.__version__}."
        )
    return made


def spilled(cubin: bytes) -> int:
    """Bytes that a thread keeps in memory for want of registers."""
    used = usage(cubin)
    return used.get("LOCAL", 0) + used.get("STACK", 0)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of memory, of the one kernel in a cubin; nothing, where the tool that
    comes with Triton is missing.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not os.access(tool, os.X_OK):
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernel = said.rpartition("Function")[2]
    return {name: int(n) for name, n in re.findall(r"\b([A-Z]+):(\d+)", kernel)}


def interpret(printed: Printed, grid: tuple[int, ...], values: Mapping[str, Any]) -> None:
    """Runs a kernel in the interpreter."""
    function(printed)[grid](*[values[name] for name, _ in printed.arguments])


__all__ = ["Binary", "binary", "function", "interpret", "interpreted", "spilled", "usage"]
