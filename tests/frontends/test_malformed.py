"""Damaged files and arguments of the wrong kind: refused with a helpful text, or read correctly.

Damage is drawn from `--seed` upwards, `--mutations` times.
"""

import io
import os
import pickle
import re
import stat
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import python

import anycell.numpy as an
from anycell import cells
from anycell.engines.cpu import isa, jit
from anycell.layouts import convert
from anycell.numpy import initializers

# -- parameters on disk ----------------------------------------------------------------------------
Damage = Callable[[bytes, np.random.Generator], bytes]


def flipped(content: bytes, rng: np.random.Generator) -> bytes:
    """Changes a few bytes."""
    damaged = bytearray(content)
    for at in rng.integers(len(content), size=rng.integers(1, 5)):
        damaged[at] ^= int(rng.integers(1, 256))
    return bytes(damaged)


def truncated(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: rng.integers(len(content))]


def cut(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = sorted(rng.integers(len(content) + 1, size=2))
    return content[:begin] + content[end:]


def doubled(content: bytes, rng: np.random.Generator) -> bytes:
    begin, end = sorted(rng.integers(len(content) + 1, size=2))
    return content[:end] + content[begin:]


def blank(content: bytes, rng: np.random.Generator) -> bytes:
    """Zeroes a range of bytes, like a sector that was never written."""
    begin, end = sorted(rng.integers(len(content) + 1, size=2))
    return content[:begin] + bytes(end - begin) + content[end:]


def extended(content: bytes, rng: np.random.Generator) -> bytes:
    more = rng.bytes(rng.integers(1, 100))
    return content + more if rng.random() < 0.5 else more + content


BYTES: list[Damage] = [flipped, flipped, truncated, cut, doubled, blank, extended]


def header(shape: object, dtype: object, order: object = False) -> bytes:
    """Returns the beginning of an `.npy` file."""
    text = repr({"descr": dtype, "fortran_order": order, "shape": shape}) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()


def _header(content: bytes, rng: np.random.Generator) -> bytes:
    """Gives an array a wrong header, which the archive's checksum covers."""
    shapes = [(8,), (1 << 40,), (1 << 62, 4), (-8,), (2, 4), (), 8, "8", (8.0,), (True,) * 3, None]
    dtypes = ["<f4", ">f4", "<f2", "<f8", "|O", "<U3", "<c8", "|V4", "<M8[s]", "|b1", "<i4", "x"]
    dtypes += [[("a", "<f4")], ("<f4", (2,)), None, "<U1000000000", "(2,)f4", 4]
    shape = shapes[rng.integers(len(shapes))]
    dtype = dtypes[rng.integers(len(dtypes))]
    order = [False, True, 2, None][rng.integers(4)]
    if rng.random() < 0.2:
        return header(shape, dtype, order) + content[-32:]
    return header(shape, dtype, order).ljust(128) + content[128:]


def _version(content: bytes, rng: np.random.Generator) -> bytes:
    return content[:6] + rng.bytes(2) + content[8:]


def _length(content: bytes, rng: np.random.Generator) -> bytes:
    return content[:8] + rng.bytes(2) + content[10:]


def _nested(content: bytes, rng: np.random.Generator) -> bytes:
    text = ["(" * 3000, "-" * 9000 + "1", "[" * 90 + "]" * 90, "{'descr': '<f4'" + ", 1" * 2000]
    chosen = text[rng.integers(len(text))].encode() + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(chosen)) + chosen


def _pickled(content: bytes, rng: np.random.Generator) -> bytes:
    bomb = pickle.dumps(Bomb())
    return bomb if rng.random() < 0.5 else header((8,), "|O") + bomb


class Bomb:
    """An object that executes something when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.putenv, ("ANYCELL_BOMB", "exploded")


MEMBERS: list[Damage] = [_header, _header, _version, _length, _nested, _pickled, *BYTES]
Member = tuple[str, bytes]


def archive(members: list[Member], rng: np.random.Generator, plain: bool = False) -> bytes:
    methods = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    method = methods[0 if plain else rng.choice(4, p=[0.4, 0.4, 0.1, 0.1])]
    with io.BytesIO() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about duplicate names
        with zipfile.ZipFile(file, "w", method) as written:
            for name, content in members:
                written.writestr(name, content)
        return file.getvalue()


def rewritten(content: bytes, rng: np.random.Generator) -> bytes:
    """Writes a valid archive with members that are damaged, swapped, missing or added."""
    with zipfile.ZipFile(io.BytesIO(content)) as whole:
        members = [(name, whole.read(name)) for name in whole.namelist()]
    at, other = rng.choice(len(members), 2, replace=False)
    (name, array), (_, array_of_other) = members[at], members[other]
    change = rng.integers(6)
    if change == 0:  # the checksums are right
        members[at] = name, array_of_other
        members[other] = members[other][0], array
    elif change == 1:
        del members[at]
    elif change == 2:
        members.append((["more.npy", name, name.removesuffix(".npy"), "../x"][at % 4], array))
    elif change == 3:
        members[at] = name.removesuffix(".npy"), array
    else:
        members[at] = name, MEMBERS[rng.integers(len(MEMBERS))](array, rng)
    return archive(members, rng)


def flagged(content: bytes, rng: np.random.Generator) -> bytes:
    """Changes a member's entry in the directory of the archive."""
    damaged, start = bytearray(content), content.index(b"PK\1\2")
    at = start + int(rng.integers(4, 46))
    damaged[at] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


DAMAGED: list[Damage] = [*BYTES, rewritten, rewritten, rewritten, flagged]
REFUSED = (KeyError, ValueError, TypeError, OSError)


def read(path: Path) -> Mapping[str, Any]:
    """Returns the arrays that NumPy reads."""
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def test_damaged_parameters(tmp_path: Path, mutation_seeds: range) -> None:
    """They are refused, and the layer is unchanged; or read correctly, if checksums are right."""
    path, saved = tmp_path / "layer.npz", an.LSTM(2, 2, seed=0)
    saved.save(path)
    content = path.read_bytes()
    layer = an.LSTM(2, 2, seed=1)
    before = {name: p.copy() for name, p in layer.parameters.items()}
    outcomes = dict.fromkeys(["refused", "taken"], 0)
    for seed in mutation_seeds:
        rng = np.random.default_rng(seed)
        damage = DAMAGED[rng.integers(len(DAMAGED))]
        path.unlink()  # some file systems sync replacements at once
        path.write_bytes(damage(content, rng))
        again = f"{damage.__name__}: pytest --seed {seed} --mutations 1"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's of headers that Python 2 wrote
                layer.load(path)
        except REFUSED as error:
            assert "given" in str(error), again
            assert "expected" in str(error), again
            for name, parameter in layer.parameters.items():
                assert np.array_equal(parameter, before[name]), again
            outcomes["refused"] += 1
        except BaseException as error:
            pytest.fail(f"{again}\n{type(error).__name__}: {error}")
        else:
            expected = read(path) if damage is rewritten else saved.parameters
            for name, parameter in layer.parameters.items():
                assert np.array_equal(parameter, np.float32(expected[name])), again
                parameter[...] = before[name]
            outcomes["taken"] += 1
    assert "ANYCELL_BOMB" not in os.environ
    if len(mutation_seeds) >= 50:
        assert all(outcomes.values())


def npz(**members: bytes) -> bytes:
    rng = np.random.default_rng(0)
    return archive([(f"{name}.npy", content) for name, content in members.items()], rng, plain=True)


def test_a_header_takes_no_memory(tmp_path: Path) -> None:
    """Neither huge headers nor highly compressed data take memory."""
    dense, path = an.Dense(2, 2), tmp_path / "bomb.npz"
    whole, member = header((2,), "<f4") + bytes(8), header((1 << 25,), "<f4")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("bias.npy", whole)
        with file.open("weight.npy", "w") as entry:
            entry.write(member)
            for _ in range(1 << 7):
                entry.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"weight: given shape \(33554432,\), expected"):
            dense.load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
        path.write_bytes(npz(weight=header((1 << 40,), "<f4"), bias=whole))
        with pytest.raises(ValueError, match=r"weight: given shape \(1099511627776,\)"):
            dense.load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_an_array_that_takes_itself_for_another(tmp_path: Path) -> None:
    """With a changed byte in the header, NumPy reads half of the data and checks no checksum."""
    dense, path = an.Dense(64, 64, seed=0), tmp_path / "dense.npz"
    dense.save(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"<f4", b"<f2", 1))
    with pytest.raises(ValueError, match=re.escape("dense.npz', which is not an .npz archive")):
        dense.load(path)


def test_a_number_is_no_path(capfd: pytest.CaptureFixture[str]) -> None:
    """A number would be taken for the descriptor of an open file, and closed."""
    dense = an.Dense(2, 2)
    for value in (True, 1, 2, None, 1.5):
        for action in (dense.load, dense.save):
            with pytest.raises(TypeError, match=re.escape(f"path: given {value!r}; expected")):
                action(value)  # type: ignore[operator]
    os.write(1, b"still open")
    assert capfd.readouterr().out == "still open"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a FIFO")
def test_save_replaces_nothing_but_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("fifo")
    for name in ("fifo", "folder", "link"):
        with pytest.raises(FileExistsError, match=f"path: given .*{name}', which is not a file"):
            an.Dense(2, 2).save(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "link"]


# -- entries of the cache --------------------------------------------------------------------------
def wrong_entries(name: str, other: str, entry: bytes, entry_of_other: bytes) -> list[bytes]:
    """Entries with valid seals of another name or code, and with damage at each border."""
    code, other_code = entry[jit._SEAL :], entry_of_other[jit._SEAL :]
    flipped = [bytearray(entry) for _ in range(4)]
    for damaged, at in zip(flipped, (0, 10, jit._SEAL + 160, -1), strict=True):
        damaged[at] ^= 1
    return [
        entry_of_other,
        jit._sealed(other, code),
        jit._sealed("", code),
        entry[: jit._SEAL] + other_code,
        entry_of_other[: jit._SEAL] + code,
        entry + entry_of_other,
        entry.replace(b"anycell\0", b"ANYCELL\0", 1),
        jit._sealed(name, b""),
        b"",
        bytes(len(entry)),
        b"not machine code at all",
        *(entry[:size] for size in (20, jit._SEAL, len(entry) // 2, len(entry) - 1)),
        entry + b"\0",
        code,
        *map(bytes, flipped),
    ]


def damage_entries(seeds: range) -> None:
    """Damages entries of the cache: each is compiled again, and computes the right bits. Entries
    of ``wrong_entries`` come first.
    """
    from tests.engines.test_cpu_runtime import axpy, check_axpy

    directory = Path(os.environ["ANYCELL_CACHE_DIR"])
    target = isa.TARGETS["generic"]

    def build(remark: str) -> jit.Library:
        library = jit.compile(f"; {remark}\n" + axpy(target), ["axpy"], target)
        check_axpy(library)
        return library

    build("one")
    (one,) = directory.iterdir()
    build("two")
    (two,) = set(directory.iterdir()) - {one}
    entry, entry_of_other = one.read_bytes(), two.read_bytes()
    wrong = wrong_entries(one.name, two.name, entry, entry_of_other)
    cases = {f"wrong {number}": damaged for number, damaged in enumerate(wrong)}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        cases[str(seed)] = BYTES[rng.integers(len(BYTES))](entry, rng)
    for case, damaged in cases.items():
        print(case, flush=True)
        one.unlink()
        one.write_bytes(damaged)
        assert build("one").cached == (damaged == entry), case
        assert one.read_bytes() == entry, case
        assert build("one").cached, case
        assert {*directory.iterdir()} == {one, two}, case


def test_damaged_entries(tmp_path: Path, mutation_seeds: range) -> None:
    """Runs in new processes, to see crashes: the seed of a crash is the last number printed."""
    batch = 500  # loaded code stays in memory
    for start in range(0, len(mutation_seeds), batch):
        seeds = mutation_seeds[start : start + batch]
        out = python(
            f"""
            import warnings
            from tests.frontends.test_malformed import damage_entries

            warnings.simplefilter("error")
            damage_entries(range({seeds.start}, {seeds.stop}))
            """,
            ANYCELL_CACHE_DIR=str(tmp_path / f"cache{start}"),
        )
        assert out.split()[-len(seeds) :] == [str(seed) for seed in seeds]


# -- arguments of the wrong kind -------------------------------------------------------------------
class Refuses:
    """Something that has its own idea of what may be asked of it."""

    def __array__(self, *_: object, **__: object) -> None:
        raise RuntimeError("I am no array")

    def __len__(self) -> int:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        return "Refuses()"


WRONG: list[Any] = [
    *(None, "junk", "", b"x", True, False, -1, 0, 1.5, float("nan"), float("inf"), -float("inf")),
    *(10**30, 10**400, 1 << 63, 1 << 31, 1j, [], [[1], [1, 2]], {}, {"f": 1, 3: 4}, {1}, (1, 2, 3)),
    *(object(), int, lambda *_: None, range(3), (None, None), memoryview(b"abcd"), ..., Refuses()),
    *(np.array([None, object()]), np.array(["a"]), np.array(3.0), np.zeros((0, 3)), np.float32(2)),
    *(np.zeros((1, 1, 1, 1)), np.zeros((2, 2), complex), np.zeros(3, "i4,f4"), np.dtype("f2")),
    *(np.zeros(3, "M8[s]"), np.full((2, 3), np.nan), np.ma.masked_all((2, 3)), ">f4", "f4,,("),
]
X, S = np.ones((3, 2, 3)), (np.zeros((1, 2, 4)),) * 2
KERAS = {"kernel": np.ones((3, 8)), "recurrent_kernel": np.ones((2, 8)), "bias": np.ones(8)}
RNG = np.random.default_rng(0)


def layer(cell: Any = cells.LSTM) -> an.RNN:
    """One that has run forward and backward."""
    rnn = an.RNN(cell, 3, 4, seed=0)
    if cell is cells.LSTM:
        rnn.backward(np.ones_like(rnn.forward(X, training=True)[0]))
    return rnn


def dense() -> an.Dense:
    made = an.Dense(3, 2, seed=0)
    made.backward(np.ones_like(made.forward(X, training=True)))
    return made


def instead(make: Callable[..., Any], whole: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A call for each name, of what is given in its place."""
    return {
        f"{make.__name__} {name}": (
            lambda value, name=name: make({**whole, name: value}),
            {"value": whole[name]},
        )
        for name in names
    }


def set_parameters(values: Any) -> None:
    layer().set_parameters(values)


def to_torch(weights: Any) -> None:
    convert(weights, "LSTM", "keras", "torch")


def from_onnx(weights: Any) -> None:
    convert(weights, "GRU", "onnx", "torch")


GRU = {"kernel": np.ones((3, 6)), "recurrent_kernel": np.ones((2, 6)), "bias": np.ones((2, 6))}
ONNX = convert(GRU, "GRU", "keras", "onnx")
# A function of no arguments that gives what is called, and good arguments for it.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "LSTM": (
        an.LSTM,
        {
            **{"input_size": 3, "hidden_size": 4, "num_layers": 1, "bias": True, "dropout": 0.0},
            **{"forget_bias": 1.0, "batch_first": False, "bidirectional": False, "seed": 0},
            **{"dtype": "float32", "initializer": "zeros", "recurrent_initializer": "orthogonal"},
            **{"gate_bias": None},
        },
    ),
    "GRU": (an.GRU, {"input_size": 3, "hidden_size": 4, "gate_bias": None}),
    "RNN": (an.RNN, {"cell": cells.LSTMP, "input_size": 3, "hidden_size": 4, "P": 2}),
    "Dense": (
        an.Dense,
        {
            **{"input_size": 3, "output_size": 4, "bias": True, "dtype": "float32", "seed": 0},
            **{"initializer": "orthogonal"},
        },
    ),
    "forward": (
        lambda **given: layer().forward(**given),
        {"x": X, "state": S, "mask": None, "lengths": None, "resets": None, "static": None},
    ),
    "static": (
        lambda **given: layer(cells.EALSTM).forward(**given),
        {"x": X, "static": np.zeros((2, 4))},
    ),
    "backward": (
        lambda **given: layer().backward(**given),
        {"grad_output": np.ones((3, 2, 4)), "grad_state": S},
    ),
    "step": (
        lambda **given: layer().step(**given),
        {"x": X[0], "state": S, "static": None, "resets": np.zeros(2)},
    ),
    "prepared": (
        lambda **given: layer().prepare().step(**given),
        {"x": X[0], "state": S, "static": None, "resets": np.zeros(2)},
    ),
    "Dense.forward": (lambda **given: dense().forward(**given), {"x": X, "training": False}),
    "Dense.backward": (lambda **given: dense().backward(**given), {"grad_output": X[..., :2]}),
    "save": (lambda path: layer().save(path), {"path": "a file"}),
    "load": (lambda path: layer().load(path), {"path": "a file"}),
    "set_parameters": (set_parameters, {"values": dict(an.LSTM(3, 4).parameters)}),
    **instead(set_parameters, an.LSTM(3, 4).parameters, "bias_ih_l0"),
    "Adam": (
        an.Adam,
        {"layers": dense(), "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
    ),
    "Adam of several": (lambda value: an.Adam([dense(), value]), {"value": dense()}),
    "clip_by_value": (an.clip_by_value, {"layers": dense(), "limit": 1.0}),
    "clip_by_global_norm": (an.clip_by_global_norm, {"layers": dense(), "max_norm": 1.0}),
    "mse": (an.mse, {"prediction": X, "target": X}),
    "uniform": (lambda bound: initializers.uniform(bound)((2, 3), RNG), {"bound": 1.0}),
    "glorot_uniform": (initializers.glorot_uniform, {"shape": (2, 3), "rng": RNG}),
    "glorot_normal": (initializers.glorot_normal, {"shape": (2, 3), "rng": RNG}),
    "orthogonal": (initializers.orthogonal, {"shape": (2, 3), "rng": RNG}),
    "zeros": (lambda shape: initializers.zeros(shape, RNG), {"shape": (2, 3)}),
    "convert": (
        convert,
        {"weights": KERAS, "kind": "LSTM", "source": "keras", "target": "torch"},
    ),
    **instead(to_torch, KERAS, *KERAS),
    **instead(from_onnx, ONNX, *ONNX),
}


@pytest.mark.parametrize(
    "call, argument", [(c, a) for c, (_, given) in CALLS.items() for a in given]
)
def test_arguments_of_the_wrong_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, argument: str
) -> None:
    """They do, or are refused by one of the documented kinds with the argument's name."""
    monkeypatch.chdir(tmp_path)
    function, given = CALLS[call]
    layer().save("a file")
    function(**given)
    for wrong in WRONG:
        if wrong is int and "initializer" in argument:  # what a function raises is its own affair
            continue
        try:
            function(**{**given, argument: wrong})
        except REFUSED as error:
            # Of several arrays that do not fit together any may be named; a file's is its name.
            names = [*given, "parameters", "weights", "path", "No such file", "grad", "state"]
            assert any(name in str(error) for name in names) or argument == "value", error
            assert "given" in str(error) or "No such file" in str(error), error
        except BaseException as error:
            pytest.fail(f"{call}({argument}={wrong!r}): {type(error).__name__}: {error}")
