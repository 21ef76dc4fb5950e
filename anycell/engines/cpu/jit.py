"""LLVM text to machine code, kept on disk between processes.

>>> code = jit.compile(text, ["lstm_forward"], isa.current())
>>> code.address("lstm_forward")
140213718941696

The text arrives vectorised and unrolled, so LLVM's own vectorisers and unroller stay off: they
would cost most of the compile time and could only undo the register tiling.

A process that finds its kernels on disk does not print their text if the caller passes a `recipe`,
from which the text follows, and does not import LLVM if `image` can load the code.

Processes that start together compile each kernel once: one compiles, and the others wait for its
entry. If it takes too long, or the file system has no locks, they compile too.

The cache holds machine code that will be executed, so it is protected: only the user can write to
its directory. Entries are named by a hash of all their inputs, sealed by a checksum and put in
place by a rename. A damaged entry is compiled again; an unusable directory causes one warning, and
nothing is cached. Links in the directory are not followed. A file that lacks our form of name or
our mark is neither used nor pruned, and does not count towards the limit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from anycell.environment import switch

from . import image, isa
from .ir import Module, Target

FORMAT = 3  # raise it when the way from text to machine code changes, so that no old entry is found
# The text leaves to LLVM: moving stack variables to registers, removing repeated computations, and
# shorter forms of instructions. Optimising at level 2 takes twice as long, and the code is no
# faster.
PASSES = ("sroa", "simplify_cfg", "new_gvn", "instruction_combine")
LIMIT = 256 << 20  # total bytes of entries above which the oldest are deleted
ABANDONED = 3600  # seconds after which a draft's process has died: writing takes a moment
PATIENCE = 30.0  # seconds that a process waits for a kernel that another process compiles

_MAGIC = b"anycell\0"
_SEAL = len(_MAGIC) + hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9a-f]{64}(?P<draft>\.[0-9a-f]{16})?")

# The LLVM text, or a function that prints it, as text or as a module that has parts.
Text = str | Callable[[], str | Module]
# The arguments of ``compile``: the text, its functions, the target, and the recipe that stands for
# the text in the cache, if there is one.
Request = tuple[Text, Sequence[str], Target, str | None]
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# Guards LLVM contexts, which are not thread-safe. A fork holds it, so that a child inherits neither
# a locked lock nor LLVM in the middle of its work.
lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )

_ending: int | None = None  # the thread in which the interpreter ends


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Holds ``lock``. While the interpreter ends, only the thread that ends it gets here."""
    with lock:
        _end_thread()
        yield


def _end_thread() -> None:
    """Ends this thread, without a message, if another thread ends the interpreter."""
    if _ending not in (None, threading.get_ident()):
        raise SystemExit


def _end() -> None:
    """Waits for the compiler and keeps it from threads that go on, such as daemons: when the
    process ends, LLVM's destructors run, and would abort the process beside the compiler.
    """
    global _ending
    _ending = threading.get_ident()  # first, so that no thread takes the lock once more
    with lock:
        pass


atexit.register(_end)


class CacheWarning(UserWarning):
    """The cache of compiled kernels cannot be used; everything works, but starts more slowly."""


class Library:
    """Loaded machine code. Its addresses stay valid for the life of the process."""

    def __init__(
        self, text: Text, target: Target, addresses: dict[str, int], cached: bool, name: str
    ) -> None:
        self._text, self.name = text, name  # of its entry in the cache
        self.target = target
        self.cached = cached  # whether the code came from disk
        self._addresses = addresses

    @property
    def text(self) -> str:
        """The LLVM text; printed anew if it was passed as a function."""
        return _printed(self._text)

    def address(self, symbol: str) -> int:
        """The address of one of the `symbols` passed to `compile`."""
        return self._addresses[symbol]

    def function(self, symbol: str) -> Callable[[int | bytes], None]:
        """One of the `symbols` as a callable, which takes a table or the address of a table."""
        return _FUNCTION(self.address(symbol))

    def assembly(self) -> str:
        """The text compiled to assembly, for reading."""
        with _alone():
            machine = _machine(self.target)
            return machine.emit_assembly(optimised(self.text, machine))

    def __repr__(self) -> str:
        return f"Library({', '.join(self._addresses)}; {self.target.name})"


def compile(
    text: Text, symbols: Sequence[str], target: Target, recipe: str | None = None
) -> Library:
    """Loads machine code for the LLVM module `text`, from the cache if it is there.

    Any thread may call this.

    Args:
        text: the text, or a function that prints it when it is needed.
        symbols: the functions whose addresses will be needed.
        recipe: everything that the text follows from; it replaces the text in the cache key.
    """
    if switch("ANYCELL_DEBUG", default=False):
        print(_printed(text), file=sys.stderr)
    with _alone():
        key = name(text, symbols, target, recipe)
        code, from_disk = cached(key, lambda: _compiled(text, symbols, target))
        addresses = image.load(code, symbols) or _load(code, symbols, target)
        return Library(text, target, addresses, from_disk, key)


def stored(text: Text, symbols: Sequence[str], target: Target, recipe: str | None) -> bytes | None:
    """The object file that `compile` would find in the cache; None if there is none."""
    if not enabled():
        return None
    try:
        with lock, _Cache(cache_directory(), create=False) as cache:
            return cache.read(name(text, symbols, target, recipe))
    except OSError:
        return None


def enabled() -> bool:
    """Whether kernels are kept on disk: true unless `ANYCELL_CACHE` is 0."""
    return switch("ANYCELL_CACHE", default=True)


def kept() -> list[int]:
    """The bytes of each entry of the cache.

    Raises:
        OSError: if the cache cannot be used.
    """
    with _Cache(cache_directory(), create=False) as cache:
        return [file.size for file in cache.files() if not file.draft and cache.is_ours(file)]


def _printed(text: Text) -> str:
    return text if isinstance(text, str) else str(text())


def code_size(code: bytes) -> int:
    """Bytes of machine instructions in an object file."""
    with _alone():
        files = map(_llvm().object_file.ObjectFileRef.from_data, image.objects(code))
        sections = (section for file in files for section in file.sections())
        return sum(section.size() for section in sections if section.is_text())


# --------------------------------------------------------------------------------------------- LLVM


@lru_cache(maxsize=1)
def _llvm() -> Any:
    """The binding, initialised on first use: importing it takes longer than all our own code."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@lru_cache(maxsize=1)
def _context() -> Any:
    """A context of our own, apart from other users of llvmlite."""
    return _llvm().create_context()


@lru_cache(maxsize=8)
def _machine(target: Target) -> Any:
    """LLVM's target machine; a new one for each object file would take a millisecond."""
    llvm = _llvm()
    cpu, features, _ = isa.machine(target)
    # The small code model reads constants relative to the program counter; the JIT's default would
    # first load each address into a register.
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )


def optimised(text: str, machine: Any) -> Any:
    """The module of a text, after the passes, for LLVM's target machine."""
    llvm = _llvm()
    module = llvm.parse_assembly(text, _context())
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    manager = llvm.create_new_module_pass_manager()
    for name in PASSES:
        getattr(manager, f"add_{name}_pass")()
    options = llvm.create_pipeline_tuning_options(speed_level=0)
    manager.run(module, llvm.create_pass_builder(machine, options))
    return module


def object_code(text: str, symbols: Sequence[str], target: Target) -> bytes:
    """The object file of a text. The caller holds ``lock``."""
    machine = _machine(target)
    module = optimised(text, machine)
    for symbol in symbols:  # LLVM ends the process when asked for an undefined symbol
        try:
            defined = not module.get_function(symbol).is_declaration
        except NameError:
            defined = False
        if not defined:
            raise ValueError(f"the LLVM text defines no function {symbol!r}")
    return machine.emit_object(module)


def _compiled(text: Text, symbols: Sequence[str], target: Target) -> bytes:
    """The object files of a text. Its parts, which other texts may have too, are cached."""
    printed = text if isinstance(text, str) else text()
    if isinstance(printed, str) or not (image.SUPPORTED and enabled()):
        return object_code(str(printed), symbols, target)
    own, parts = printed.parts()
    code = object_code(own, symbols, target)
    for part in parts:
        build = functools.partial(object_code, part, (), target)
        code += cached(name(part, (), target), build)[0]
    return code


def _load(code: bytes, symbols: Sequence[str], target: Target) -> dict[str, int]:
    llvm = _llvm()
    files = [*image.objects(code)]
    # llvmlite's own memory manager keeps all sections in one block, as the small code model needs;
    # it takes a single file. The engine takes the machine over.
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly("", _context()),
        _machine.__wrapped__(target),
        use_lmm=len(files) == 1,
    )
    for file in files:
        engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(file))
    engine.finalize_object()
    addresses = {symbol: engine.get_function_address(symbol) for symbol in symbols}
    engine.detach()  # never freed: a thread may still run it, even while the interpreter exits
    return addresses


# -------------------------------------------------------------------------------------------- cache


@lru_cache(maxsize=1)
def _toolchain() -> str:
    """Names the LLVM that compiles, and the system, without loading LLVM.

    The size of llvmlite's library stands for the version of the LLVM that was built into it.
    """
    import llvmlite

    llvm: Any
    try:
        with os.scandir(os.path.join(os.path.dirname(llvmlite.__file__), "binding")) as entries:
            llvm = sorted(
                (entry.name, entry.stat().st_size)
                for entry in entries
                if entry.is_file() and not entry.name.endswith(".py")
            )
    except OSError:  # the library lies elsewhere, as in a frozen program
        llvm = _llvm().llvm_version_info
    return f"{llvmlite.__version__} {llvm} {sys.platform} {platform.machine()}"


def name(text: Text, symbols: Sequence[str], target: Target, recipe: str | None = None) -> str:
    """The name of the entry: a hash of everything that changes the code or its functions."""
    cpu, features, _ = isa.machine(target)
    parts = [str(FORMAT), _toolchain(), cpu, features, " ".join(symbols)]
    parts += ["text", _printed(text)] if recipe is None else ["recipe", recipe]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cache_directory() -> str:
    """The directory of compiled kernels: `$ANYCELL_CACHE_DIR`, else the user's cache directory."""
    if chosen := os.environ.get("ANYCELL_CACHE_DIR"):
        path = os.path.expanduser(chosen)
        with contextlib.suppress(OSError):  # a relative path, and the working directory is gone
            path = os.path.abspath(path)
        return path
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore a relative one
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "anycell")


def _sealed(name: str, code: bytes) -> bytes:
    # The checksum covers the name, so that an entry renamed to another entry's name is rejected.
    return _MAGIC + hashlib.sha256(name.encode() + code).digest() + code


def _check_private(status: os.stat_result) -> None:
    """Raises OSError if another user could have written the file or directory of this status."""
    if not hasattr(os, "geteuid"):  # Windows: a user's profile is private by inheritance
        return
    if status.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to uid {status.st_uid}, not to you")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"others can write it (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w it)"
        )


class _File(NamedTuple):
    """A file that may be an entry or a draft by its name and kind."""

    written: float
    size: int
    name: str
    draft: bool


class _Cache:
    """An open cache directory.

    If the system allows it, files are reached through the descriptor of the directory that was
    checked, so that nobody can swap the directory after the check.
    """

    def __init__(self, path: str, create: bool = True) -> None:
        if create:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        self.path = path
        self._fd: int | None = None
        if {os.open, os.rename, os.unlink, os.stat} <= os.supports_dir_fd and (
            os.scandir in os.supports_fd
        ):
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.stat(path if self._fd is None else self._fd)
            _check_private(status)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError("it is not a directory")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # nothing was written through this descriptor
                os.close(self._fd)

    def __enter__(self) -> _Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, path: str, flags: int) -> int:
        # Uses the flags that the system has. If only the name looks like ours, a link is not
        # followed, a FIFO is not waited for, and a terminal does not become our own.
        for extra in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"):
            flags |= getattr(os, extra, 0)
        return os.open(path, flags, 0o600, dir_fd=self._fd)

    def _name(self, name: str) -> str:
        return name if self._fd is not None else os.path.join(self.path, name)

    def _contents(self, name: str, most: int = -1) -> bytes:
        """The first ``most`` bytes of a file; OSError unless it is a regular file of ours alone."""
        with open(self._name(name), "rb", opener=self._open) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:
                raise OSError("it is not an entry")
            _check_private(status)
            return file.read(most)

    def read(self, name: str) -> bytes | None:
        """The code stored under `name`; None if there is none or it cannot be trusted."""
        try:
            entry = self._contents(name)
        except OSError:
            return None
        code = entry[_SEAL:]
        return code if code and entry == _sealed(name, code) else None

    def write(self, name: str, code: bytes) -> None:
        """Puts an entry in place, whole or not at all."""
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(self._name(name), dir_fd=self._fd, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode):
                raise FileExistsError(f"{name} exists and is not a file")
        draft = f"{name}.{os.urandom(8).hex()}"
        try:
            with open(self._name(draft), "xb", opener=self._open) as file:
                file.write(_sealed(name, code))
            os.replace(
                self._name(draft), self._name(name), src_dir_fd=self._fd, dst_dir_fd=self._fd
            )
        except FileExistsError:  # the file of the draft's name is not ours
            raise
        except BaseException:
            self._unlink(draft)
            raise
        with contextlib.suppress(OSError):  # the entry is in place; the next write prunes again
            self._prune()

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """Waits until no other process compiles an entry, and keeps others waiting. The system ends
        the claim of a process that dies.

        The claim is a locked file with the name of a draft. Nothing relies on it: without locks,
        or after ``PATIENCE``, two processes compile the same entry, and one replaces the other's.
        """
        claimed, file = f"{name}.{0:016x}", None
        with contextlib.suppress(OSError):  # a directory that is read only, or a strange file
            file = self._open(self._name(claimed), os.O_RDWR | os.O_CREAT)
        try:
            until = time.monotonic() + PATIENCE
            while file is not None and not _locked(file) and time.monotonic() < until:
                _end_thread()
                time.sleep(0.005)
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    os.close(file)
                self._unlink(claimed)

    def files(self) -> list[_File]:
        """The regular files whose names have our form."""
        files = []
        with os.scandir(self.path if self._fd is None else self._fd) as listing:
            for item in listing:
                name = _NAME.fullmatch(item.name)
                with contextlib.suppress(OSError):  # another process has renamed its draft
                    status = item.stat(follow_symlinks=False) if name else None
                    if name and status and stat.S_ISREG(status.st_mode):
                        draft = name["draft"] is not None
                        files.append(_File(status.st_mtime, status.st_size, item.name, draft))
        return files

    def is_ours(self, file: _File) -> bool:
        """Whether a file begins with our mark; a draft may end before the mark is complete."""
        try:
            mark = self._contents(file.name, len(_MAGIC))
        except OSError:
            return False
        return _MAGIC.startswith(mark) if file.draft else mark == _MAGIC

    def _prune(self) -> None:
        """Deletes abandoned drafts, and the oldest entries while all exceed the limit."""
        files, forgotten = self.files(), time.time() - ABANDONED
        for file in files:
            if file.draft and file.written < forgotten and self.is_ours(file):
                self._unlink(file.name)
        entries = [file for file in files if not file.draft]
        if sum(file.size for file in entries) <= LIMIT:  # reading the marks would take longer
            return
        entries = [file for file in entries if self.is_ours(file)]
        excess = sum(file.size for file in entries) - LIMIT
        for file in sorted(entries):
            if excess <= 0:
                break
            self._unlink(file.name)
            excess -= file.size

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):  # another process was faster
            os.unlink(self._name(name), dir_fd=self._fd)


if sys.platform == "win32":
    import msvcrt

    def _locked(file: int) -> bool:
        """Locks an open file until it is closed; False while another process has locked it."""
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        except OSError:  # no locks here
            pass
        return True

else:
    import fcntl

    def _locked(file: int) -> bool:
        """Locks an open file until it is closed; False while another process has locked it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # no locks here
            pass
        return True


_warned: set[str] = set()


def _warn(error: OSError) -> None:
    """Warns once per directory that it is not used, why, and what to do about it."""
    path = cache_directory()
    if path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"compiled kernels are not kept in {path!r}: {error.strerror or error}. Each process "
            "compiles them anew, in a few tenths of a second per kernel. Set ANYCELL_CACHE_DIR to "
            "a directory that only you can write, or ANYCELL_CACHE=0 to silence this warning.",
            CacheWarning,
            stacklevel=_level(sys._getframe(1)),
        )


def _level(frame: Any) -> int:
    """The stack level at which a warning points at the user's call: past this package, and past the
    installed ones through which it was called, such as a framework.
    """
    package, level = str(Path(__file__).parents[2]) + os.sep, 2
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(package) or "site-packages" in file or "dist-packages" in file):
            break
        frame, level = frame.f_back, level + 1
    return level


def cached(name: str, build: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The entry of `name`, and whether it was in the cache; if not, it is built and stored.

    Args:
        name: a sha256 in hexadecimal digits of everything from which the entry follows.
    """
    if not enabled():
        return build(), False
    try:
        cache = _Cache(cache_directory())
    except OSError as error:
        _warn(error)
        return build(), False
    with cache:
        if code := cache.read(name):
            return code, True
        with cache.claim(name):
            if code := cache.read(name):  # another process was faster
                return code, True
            code = build()
            try:
                cache.write(name, code)
            except OSError as error:
                _warn(error)
            return code, False
