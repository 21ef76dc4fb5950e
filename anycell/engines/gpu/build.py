"""From text to kernels: files, Triton, cubins.

Triton reads a kernel's source from its file, so texts are written to the user's cache directory
(``$ANYCELL_CACHE_DIR/triton``), where they can be read, and stepped through in the interpreter.
What runs is the text printed here, never what a file happens to hold.

Cubins are kept in the cache of kernels, whose rules `engines.cpu.jit` states, so a process that
finds its own there imports no Triton. Triton is imported when one has to be compiled, and by
``TRITON_INTERPRET=1``, which runs kernels in its interpreter, on arrays of PyTorch on the CPU.
Triton and TensorFlow each bring an LLVM, and the process would end if Triton came second: beside
TensorFlow alone, a child process compiles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pickle
import re
import secrets
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anycell.engines.cpu.jit import cache_directory, cached, enabled
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.text import Printed, Variant
from anycell.requirement import install

OLDEST = (3, 3)  # release of Triton; PyTorch 2.7 brings it
# Arguments that Triton may add at the end of a kernel: scratch memory, its own and its profiler's.
MOST_HIDDEN = 2
PROBED = 90  # the compute capability that the first kernel is compiled for
REGISTERS, MOST_REGISTERS = 1 << 16, 255  # of a multiprocessor, of a thread
MOST_SPILLED = 64  # bytes per thread of a kernel that loops over time: each step pays for them


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for one kind of device.

    Attributes:
        symbol: the kernel's name in the cubin.
        cubin, ptx: machine code, and the text before it.
        shared: bytes of shared memory.
        warps: of 32 threads.
        hidden: how many pointers Triton takes after our arguments.
        spilled: bytes that a thread keeps in memory for want of registers.
    """

    symbol: str
    cubin: bytes
    ptx: str
    shared: int
    warps: int
    hidden: int
    spilled: int

    @staticmethod
    def read(entry: bytes) -> Binary:
        """The binary that ``entry`` wrote."""
        fields = json.loads(entry)
        return Binary(**fields | {"cubin": bytes.fromhex(fields["cubin"])})

    def entry(self) -> bytes:
        """The binary as an entry of the cache."""
        return json.dumps(asdict(self) | {"cubin": self.cubin.hex()}).encode()

    def misfit(self, shared: int) -> str | None:
        """Why the kernel does not fit on a device with ``shared`` bytes of shared memory."""
        if self.shared > shared:
            return f"it takes {self.shared:,} bytes of shared memory, of which there are {shared:,}"
        if self.spilled > MOST_SPILLED:
            return f"registers do not suffice: each thread keeps {self.spilled:,} bytes in memory"
        return None


@functools.cache
def unusable() -> str | None:
    """Says why no kernel can be made here; None if a small kernel compiles, or is interpreted.

    The small kernel takes a second or two to compile; then the cache has it.
    """
    if _package() is None:
        return f"the GPU engine needs Triton, which is not installed; {install('gpu')}"
    version = f"this is Triton {_version()}"
    if release(_version()) < OLDEST:
        return f"the GPU engine needs Triton {'.'.join(map(str, OLDEST))} or newer; {version}"
    try:
        if not interpreted():
            binary(_probe(), PROBED)
        elif _would_abort():
            return (
                "Triton's interpreter cannot be loaded after TensorFlow; import triton before "
                "tensorflow, or unset TRITON_INTERPRET"
            )
        else:
            import triton  # noqa: F401
    except Exception as error:
        return f"Triton compiles no kernel of the GPU engine: {_in_words(error)}; {version}"
    return None


def _package() -> Path | None:
    """The directory of Triton, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec("triton")
    return Path(spec.origin).parent if spec and spec.origin else None


@functools.cache
def _version() -> str:
    """Triton's version, as its own file says it."""
    package = _package()
    assert package is not None
    stated = re.search(
        r"^__version__ = ['\"](.+?)['\"]", (package / "__init__.py").read_text(), re.M
    )
    return stated[1] if stated else "of an unknown version"


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def compiler() -> tuple[int, ...]:
    """The release of the Triton that compiles, such as (3, 9)."""
    return release(_version())


def _would_abort() -> bool:
    """Whether Triton must not be imported any more, because TensorFlow has been."""
    return "tensorflow" in sys.modules and "triton" not in sys.modules


def _in_words(error: Exception) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _probe() -> Printed:
    """A small kernel that needs of Triton what others need: matrices, random numbers, flags."""
    from anycell import cells
    from anycell.engines.gpu.capacity import choose
    from anycell.engines.gpu.cooperative import print_cooperative
    from anycell.plan import plan

    zoneout = plan(cells.ZoneoutLSTM, 16, "float16", "gpu")
    choice = choose(zoneout, None, tier=2)
    assert choice.part is not None
    variant = Variant(draw=True, biases=(True,))
    return print_cooperative(zoneout, variant, choice.part, choice.precision)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    triton: Any = sys.modules.get("triton")
    if hasattr(triton, "knobs"):
        return bool(triton.knobs.runtime.interpret)
    # Triton 3.3 takes "1" alone.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.lru_cache(maxsize=4096)
def function(printed: Printed) -> Any:
    """The Triton function of a printed kernel."""
    path = _written(printed)
    names: dict[str, Any] = {"__name__": f"anycell_{printed.name}", "__file__": path}
    exec(compile(printed.source, path, "exec"), names)
    return names[printed.name]


def _written(printed: Printed) -> str:
    """Writes the text to a file and returns the path."""
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
    """A directory for this process alone, if others can write to the cache or it is unusable."""
    return tempfile.mkdtemp(prefix="anycell-triton-")


@functools.lru_cache(maxsize=4096)
def binary(printed: Printed, capability: int, aligned: frozenset[str] = frozenset()) -> Binary:
    """Machine code, from the cache or compiled without a device.

    Args:
        printed: the kernel.
        capability: of the device, 90 for an H100.
        aligned: the arguments, addresses or strides, that 16 divides.

    Raises:
        Refused: if Triton does not compile it.
    """
    # In one order, whatever the seed of this process's hashes: Triton's own cache depends on it.
    request = printed, capability, sorted(aligned)
    key = hashlib.sha256(repr((_sources(), _version(), *request)).encode()).hexdigest()
    compile_ = _compiled_apart if _would_abort() else _compiled
    return Binary.read(cached(key, lambda: compile_(*request).entry())[0])


@functools.cache
def _sources() -> str:
    """Names the files of ours that a cubin follows from, besides the kernel's text."""
    files = (Path(__file__).with_name(name).read_bytes() for name in ("build.py", "library.py"))
    return hashlib.sha256(b"".join(files)).hexdigest()


def _compiled_apart(printed: Printed, capability: int, aligned: list[str]) -> Binary:
    """``_compiled`` in a child process, which may import Triton."""
    child = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import compile_for_parent as run; run()"],
        input=pickle.dumps((printed, capability, aligned)),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if child.returncode:
        lines = child.stderr.decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        raise Refused(printed, f"the process that compiles ended with {child.returncode}: {said}")
    entry, why = pickle.loads(child.stdout)
    if why is not None:
        raise Refused(printed, why)
    return Binary.read(entry)


def compile_for_parent() -> None:
    """Compiles the kernel on standard input, and answers ``_compiled_apart`` on standard output."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Triton prints must not get into the answer
    entry, why = None, None
    try:
        entry = _compiled(*pickle.load(sys.stdin.buffer)).entry()
    except Refused as refused:
        why = refused.why
    with answer:
        pickle.dump((entry, why), answer)


def _compiled(printed: Printed, capability: int, aligned: list[str]) -> Binary:
    """Compiles a kernel in this process."""
    # The assembler saves registers so that two programs fit on a multiprocessor: it does not know
    # how much shared memory one takes. A cooperative kernel may use all registers from the start;
    # otherwise the assembler would load other programs' results in parts, and wait for each part.
    most = min(MOST_REGISTERS, REGISTERS // (32 * printed.warps))
    first, second = (most, None) if printed.cooperative else (None, most)
    made = _made(printed, capability, aligned, first)
    spills = spilled(made.asm["cubin"]) if printed.alone else 0
    if spills and (first or usage(made.asm["cubin"])["REG"] < most):
        # Without a limit kernels may spill a little to save registers, with all registers because
        # they keep weights in them; but hardly ever both. If the assembler took all registers
        # unasked, the result would be the same again.
        again = _made(printed, capability, aligned, second)
        spills_again = spilled(again.asm["cubin"])
        if spills_again < spills:
            made, spills = again, spills_again
    return Binary(
        made.metadata.name,
        made.asm["cubin"],
        made.asm["ptx"],
        made.metadata.shared,
        made.metadata.num_warps,
        _declared(made) - len(printed.arguments),
        spills,
    )


def _made(printed: Printed, capability: int, aligned: list[str], registers: int | None) -> Any:
    """Compiles a kernel with Triton; its threads may use ``registers`` registers."""
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
    except Exception as error:  # Triton's, the assembler's, LLVM's: there is no common class
        cause: BaseException = error
        while cause.__cause__ is not None:  # the innermost error says what is wrong
            cause = cause.__cause__
        lines = [line.strip() for line in str(cause).splitlines() if line.strip(" ^")]
        message = lines[-1] if lines else type(cause).__name__
        why = f"Triton {triton.__version__} does not compile it for sm_{capability}: {message}"
        raise Refused(printed, why) from error
    scratch = made.metadata.global_scratch_size, getattr(made.metadata, "profile_scratch_size", 0)
    if any(scratch):
        raise Refused(printed, f"Triton {triton.__version__} wants scratch memory for it")
    ours, declared = len(printed.arguments), _declared(made)
    if not ours <= declared <= ours + MOST_HIDDEN:
        raise Refused(
            printed,
            f"compiled by Triton {triton.__version__} it takes {declared} arguments; expected its "
            f"{ours} and at most {MOST_HIDDEN} of Triton's own",
        )
    return made


def _declared(made: Any) -> int:
    """Counts the arguments of a kernel."""
    return made.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0].count(".param")


def spilled(cubin: bytes) -> int:
    """Bytes that a thread keeps in memory for want of registers."""
    used = usage(cubin)
    return used.get("LOCAL", 0) + used.get("STACK", 0)


def usage(cubin: bytes) -> dict[str, int]:
    """The registers, and the bytes of memory, of the only kernel in a cubin; empty if the tool that
    comes with Triton is missing.
    """
    package = _package()
    tool = package and package / "backends" / "nvidia" / "bin" / "cuobjdump"
    if tool is None or not os.access(tool, os.X_OK):
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernel = printed.rpartition("Function")[2]
    return {name: int(n) for name, n in re.findall(r"\b([A-Z]+):(\d+)", kernel)}
