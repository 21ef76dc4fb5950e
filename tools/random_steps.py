"""Random steps of recurrent cells, read and held against the plain loop of their framework.

    python tools/random_steps.py --framework jax --seed 1 --count 100
    python tools/random_steps.py --framework jax --quick  # programs that XLA does not optimize
    python tools/random_steps.py --framework torch --seed 17 --count 1 --source  # the text of one

Each seed is a random graph of one step: states of several sizes, inputs, weights, products,
concatenations, splits, element-wise functions, reductions, norms, broadcasts, resets and counters.
It is printed as source code of the framework, run, read through the framework's door
(``anycell.jax.scan``, ``anycell.torch.loop``, ``anycell.keras.RNN``), and compared with the plain
loop in float64: outputs, last states, and all gradients. Counted are the steps that are read, those
that are refused, by reason, and those that are wrong, whose seeds and sources are printed.

One file, because the steps, their spelling in each framework and the comparison follow each other.
"""

import argparse
import collections
import functools
import linecache
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.insert(0, str(Path(__file__).parents[1]))

# Most of a step's time XLA takes to compile it, in programs that run twice.
QUICK = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_llvm_disable_expensive_passes=true",
}
FRAMEWORKS = ("jax", "torch", "tensorflow", "numpy")
BATCH, STEPS, INPUT = 3, 5, 5
# The largest norm(out - ref) / norm(ref), and how far a result may move when all numbers of the
# plain loop are off by a rounding each: what is ill-conditioned may err by so many times as much.
LIMITS = {"output": 1e-12, "gradient": 1e-11}
ROUNDINGS = 100.0

Shape = tuple[int, ...]


class Value(NamedTuple):
    """A name of the step's source, its shape without the batch, and whether it is a condition."""

    name: str
    shape: Shape
    boolean: bool = False


# How each framework spells a function of arrays; what all spell alike is written as text.
JAX = {
    "tanh": "jnp.tanh({})", "sigmoid": "jax.nn.sigmoid({})", "relu": "jax.nn.relu({})",
    "softplus": "jax.nn.softplus({})", "silu": "jax.nn.silu({})", "elu": "jax.nn.elu({})",
    "leaky_relu": "jax.nn.leaky_relu({}, 0.1)", "gelu": "jax.nn.gelu({}, approximate=False)",
    "log_sigmoid": "jax.nn.log_sigmoid({})", "exp": "jnp.exp({})", "log1p": "jnp.log1p({})",
    "abs": "jnp.abs({})", "sqrt": "jnp.sqrt({})", "rsqrt": "lax.rsqrt({})", "sin": "jnp.sin({})",
    "cos": "jnp.cos({})", "sign": "jnp.sign({})", "square": "jnp.square({})",
    "clip": "jnp.clip({}, -0.5, 0.5)", "hard_sigmoid": "jnp.clip({} / 6 + 0.5, 0, 1)",
    "stop": "lax.stop_gradient({})", "power": "jnp.power({}, 3)",
    "maximum": "jnp.maximum({}, {})", "minimum": "jnp.minimum({}, {})",
    "where": "jnp.where({}, {}, {})", "zeros": "jnp.zeros_like({})",
    "sum": "jnp.sum({}, axis={}, keepdims={})", "mean": "jnp.mean({}, axis={}, keepdims={})",
    "max": "jnp.max({}, axis={}, keepdims={})", "min": "jnp.min({}, axis={}, keepdims={})",
    "var": "jnp.var({}, axis={}, keepdims={})", "softmax": "jax.nn.softmax({}, axis=-1)",
    "logsumexp": "jax.nn.logsumexp({}, axis=-1)", "concat": "jnp.concatenate([{}], axis=-1)",
    "stack": "jnp.stack([{}], axis={})", "split": "jnp.split({}, {}, axis=-1)",
    "reshape": "{}.reshape({}.shape[0], {})", "transpose": "{}.transpose(0, 2, 1)",
    "einsum": "jnp.einsum({}, {}, {})", "flip": "jnp.flip({}, axis=-1)",
    "roll": "jnp.roll({}, 1, axis=-1)", "matmul": "jnp.matmul({}, {})",
    "float": "{}.astype(jnp.float64)", "logical_and": "jnp.logical_and({}, {})",
    "logical_not": "jnp.logical_not({})", "broadcast": "jnp.broadcast_to({}, ({}.shape[0], {}))",
    "norm": "jnp.linalg.norm({})",
}  # fmt: skip
TORCH = {
    "tanh": "torch.tanh({})", "sigmoid": "torch.sigmoid({})", "relu": "F.relu({})",
    "softplus": "F.softplus({})", "silu": "F.silu({})", "elu": "F.elu({})",
    "leaky_relu": "F.leaky_relu({}, 0.1)", "gelu": "F.gelu({})",
    "log_sigmoid": "F.logsigmoid({})", "exp": "torch.exp({})", "log1p": "torch.log1p({})",
    "abs": "{}.abs()", "sqrt": "torch.sqrt({})", "rsqrt": "torch.rsqrt({})",
    "sin": "torch.sin({})", "cos": "torch.cos({})", "sign": "torch.sign({})",
    "square": "{}.square()", "clip": "{}.clamp(-0.5, 0.5)",
    "hard_sigmoid": "({} / 6 + 0.5).clamp(0, 1)",
    "stop": "{}.detach()", "power": "{}.pow(3)", "maximum": "torch.maximum({}, {})",
    "minimum": "torch.minimum({}, {})", "where": "torch.where({}, {}, {})",
    "zeros": "torch.zeros_like({})", "sum": "{}.sum(dim={}, keepdim={})",
    "mean": "{}.mean(dim={}, keepdim={})", "max": "{}.amax(dim={}, keepdim={})",
    "min": "{}.amin(dim={}, keepdim={})", "var": "{}.var(dim={}, correction=0, keepdim={})",
    "softmax": "torch.softmax({}, dim=-1)", "logsumexp": "torch.logsumexp({}, dim=-1)",
    "concat": "torch.cat([{}], dim=-1)", "stack": "torch.stack([{}], dim={})",
    "split": "torch.chunk({}, {}, dim=-1)", "reshape": "{}.reshape({}.shape[0], {})",
    "transpose": "{}.transpose(1, 2)", "einsum": "torch.einsum({}, {}, {})",
    "flip": "{}.flip(-1)", "roll": "{}.roll(1, dims=-1)", "matmul": "torch.matmul({}, {})",
    "float": "{}.double()", "logical_and": "torch.logical_and({}, {})",
    "logical_not": "torch.logical_not({})", "broadcast": "{}.expand({}.shape[0], {})",
    "norm": "torch.linalg.norm({})",
}  # fmt: skip
TENSORFLOW = {
    "tanh": "tf.tanh({})", "sigmoid": "tf.sigmoid({})", "relu": "tf.nn.relu({})",
    "softplus": "tf.nn.softplus({})", "silu": "tf.nn.silu({})", "elu": "tf.nn.elu({})",
    "leaky_relu": "tf.nn.leaky_relu({}, 0.1)", "gelu": "tf.nn.gelu({})",
    "log_sigmoid": "tf.math.log_sigmoid({})", "exp": "tf.exp({})", "log1p": "tf.math.log1p({})",
    "abs": "tf.abs({})", "sqrt": "tf.sqrt({})", "rsqrt": "tf.math.rsqrt({})", "sin": "tf.sin({})",
    "cos": "tf.cos({})", "sign": "tf.sign({})", "square": "tf.square({})",
    "clip": "tf.clip_by_value({}, -0.5, 0.5)",
    "hard_sigmoid": "keras.activations.hard_sigmoid({})", "stop": "tf.stop_gradient({})",
    "power": "tf.pow({}, 3)", "maximum": "tf.maximum({}, {})", "minimum": "tf.minimum({}, {})",
    "where": "tf.where({}, {}, {})", "zeros": "tf.zeros_like({})",
    "sum": "tf.reduce_sum({}, axis={}, keepdims={})",
    "mean": "tf.reduce_mean({}, axis={}, keepdims={})",
    "max": "tf.reduce_max({}, axis={}, keepdims={})",
    "min": "tf.reduce_min({}, axis={}, keepdims={})",
    "var": "tf.math.reduce_variance({}, axis={}, keepdims={})",
    "softmax": "tf.nn.softmax({}, axis=-1)", "logsumexp": "tf.reduce_logsumexp({}, axis=-1)",
    # In a graph TensorFlow 2.21 stacks another part of a split than it is given twice: hence 0.0.
    "concat": "tf.concat([{}], axis=-1)", "stack": "tf.stack([v + 0.0 for v in [{}]], axis={})",
    "split": "tf.split({}, {}, axis=-1)", "reshape": "tf.reshape({}, [tf.shape({})[0], {}])",
    "transpose": "tf.transpose({}, [0, 2, 1])", "einsum": "tf.einsum({}, {}, {})",
    "flip": "tf.reverse({}, axis=[-1])", "roll": "tf.roll({}, 1, axis=-1)",
    "matmul": "tf.matmul({}, {})", "float": "tf.cast({}, tf.float64)",
    "logical_and": "tf.logical_and({}, {})", "logical_not": "tf.logical_not({})",
    "broadcast": "tf.broadcast_to({}, [tf.shape({})[0], {}])", "norm": "tf.norm({})",
}  # fmt: skip
# NumPy has no activations: those that it lacks are others, as it is the step that must be random.
NUMPY = {word: text.replace("jnp.", "np.") for word, text in JAX.items()} | {
    "sigmoid": "(1 / (1 + np.exp(-({}))))", "relu": "np.maximum({}, 0)",
    "softplus": "np.log1p(np.exp({}))", "silu": "np.tanh({})",
    "leaky_relu": "np.maximum({}, -0.1)", "gelu": "np.sin({})", "stop": "np.tanh({})",
    "log_sigmoid": "-np.log1p(np.exp(-({})))", "rsqrt": "(1 / np.sqrt({}))",
    "softmax": "np.cos({})", "logsumexp": "np.sum({}, axis=-1)", "einsum": "np.matmul({1}, {2})",
    "min": "(-np.max(-({}), axis={}, keepdims={}))", "norm": "np.sqrt(np.sum({0} * {0}))",
    "elu": "np.expm1(np.minimum({}, 0))",
}  # fmt: skip
SPELLINGS = {"jax": JAX, "torch": TORCH, "tensorflow": TENSORFLOW, "numpy": NUMPY}

SMOOTH = "tanh sigmoid softplus silu gelu log_sigmoid sin cos square".split()
KINKED = "relu elu leaky_relu abs clip hard_sigmoid sign power stop".split()


@dataclass
class Step:
    """A random step: the shapes of its states, inputs and weights, and its lines of source."""

    framework: str
    random: np.random.Generator
    states: dict[str, Shape] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    weights: dict[str, Shape] = field(default_factory=dict)
    counts: bool = False
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    # -- the parts of a line --
    def spell(self, word: str, *operands: object) -> str:
        return SPELLINGS[self.framework][word].format(*operands)

    def let(self, text: str, shape: Shape, boolean: bool = False) -> Value:
        """A new line: a name for what the text computes."""
        value = Value(f"v{len(self.lines)}", shape, boolean)
        self.lines.append(f"{value.name} = {text}")
        self.values.append(value)
        return value

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = shape
        return name

    def pick(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def chance(self, likely: float) -> bool:
        return bool(self.random.random() < likely)

    def any(self, test: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """A float value that passes a test, a late one rather than an early one; None if none."""
        fit = [v for v in self.values if not v.boolean and test(v)]
        return fit[int(len(fit) * self.random.random() ** 0.6)] if fit else None

    def vector(self) -> Value:
        return self.any(lambda v: len(v.shape) == 1) or self.values[0]

    # -- what a turn may do --
    def product(self) -> Value:
        value, out = self.vector(), self.pick(2, 3, 6, 6, 6)
        if self.chance(0.3):
            other = self.vector()
            operands = f"{value.name}, {other.name}"
            value = self.let(self.spell("concat", operands), (value.shape[0] + other.shape[0],))
        (n,) = value.shape
        if self.chance(0.2):
            weight = self.weight(out, n)
            turned = weight + ".T" * (self.framework == "numpy")
            text = self.spell("einsum", "'bi,oi->bo'", value.name, turned)
        elif self.chance(0.2) and self.framework != "tensorflow":
            text = self.spell("matmul", value.name, f"{self.weight(out, n)}.T")
        else:
            text = self.spell("matmul", value.name, self.recurrent_weight(n, out))
        if self.chance(0.5):
            text += f" + {self.weight(out)}"
        return self.let(text, (out,))

    def recurrent_weight(self, n: int, out: int) -> str:
        """A matrix, or a function of some."""
        kind = self.random.random()
        name = self.weight(n, out)
        if kind < 0.1:
            return self.spell("tanh", name)
        if kind < 0.2:
            return f"({name} / {self.spell('norm', name)})"
        if kind < 0.3:
            return self.spell("matmul", name, self.weight(out, out))
        if kind < 0.4:
            wide = self.weight(n, out + 2)
            return f"({name} + {wide}[:, 1:-1])"
        return name

    def heads(self) -> Value:
        if self.framework == "numpy":  # its products are of two axes
            return self.product()
        value = self.any(lambda v: len(v.shape) == 2) or self.folded()
        k, n = value.shape
        out = self.pick(2, 3)
        weight = self.weight(k, n, out)
        return self.let(self.spell("einsum", "'bkn,kno->bko'", value.name, weight), (k, out))

    def folded(self) -> Value:
        value = self.any(lambda v: len(v.shape) == 1 and v.shape[0] % 2 == 0) or self.product()
        (n,) = value.shape
        shape = (2, n // 2) if n % 2 == 0 else (1, n)
        text = self.spell("reshape", value.name, value.name, ", ".join(map(str, shape)))
        return self.let(text, shape)

    def elementwise(self) -> Value:
        value = self.any() or self.values[0]
        word = self.pick(*SMOOTH, *SMOOTH, *KINKED, "exp", "log1p", "sqrt", "rsqrt")
        operand = value.name
        if word == "exp":
            operand = self.pick(f"-{self.spell('abs', operand)}", self.spell("tanh", operand))
        if word in ("log1p", "sqrt", "rsqrt"):
            operand = f"{self.spell('square', operand)} + {self.pick(0.5, 1, 1.5)}"
        return self.let(self.spell(word, operand), value.shape)

    def arithmetic(self) -> Value:
        a = self.any() or self.values[0]
        b = self.any(lambda v: v.shape == a.shape) or a
        kind = self.random.integers(9)
        if kind < 3:
            text = f"{a.name} {self.pick('+', '-', '*')} {b.name}"
        elif kind == 3:
            text = f"{a.name} / (1.0 + {self.spell('square', b.name)})"
        elif kind == 4:
            text = self.spell(self.pick("maximum", "minimum"), a.name, b.name)
        elif kind == 5:
            gate = self.spell("sigmoid", b.name)
            text = f"{gate} * {a.name} + (1 - {gate}) * {self.spell('tanh', b.name)}"
        elif kind == 6 and a.shape:
            text = f"{a.name} {self.pick('+', '*', '-')} {self.weight(*a.shape[-1:])}"
        elif kind == 7:
            number = round(float(self.random.normal()), 3)
            text = self.pick(f"{number} * {a.name}", f"{number} - {a.name}", f"{a.name} / 1.7")
        else:
            text = f"{a.name} {self.pick('+', '*')} {self.weight()}"
        return self.let(text, a.shape)

    def cut(self) -> Value:
        value = self.any(lambda v: len(v.shape) >= 1 and v.shape[-1] > 1) or self.product()
        *front, n = value.shape
        kind = self.random.integers(5)
        if kind == 0:
            a = int(self.random.integers(n))
            b = int(self.random.integers(a, n)) + 1
            return self.let(f"{value.name}[..., {a}:{b}]", (*front, b - a))
        if kind == 1:
            return self.let(f"{value.name}[..., {int(self.random.integers(n))}]", tuple(front))
        if kind == 2 and n > 3:
            step = f"{value.name}[..., ::2]"
            return self.let(step, (*front, -(-n // 2)))
        parts = next(k for k in (self.pick(2, 3), 3, 2, n) if n % k == 0)
        names = [f"p{len(self.lines)}_{k}" for k in range(parts)]
        self.lines.append(f"{', '.join(names)} = {self.spell('split', value.name, parts)}")
        self.values += [Value(name, (*front, n // parts)) for name in names]
        return self.values[-1]

    def move(self) -> Value:
        value = self.any(lambda v: len(v.shape) >= 1) or self.product()
        kind = self.random.integers(4)
        if kind == 0 and len(value.shape) == 2:
            return self.let(self.spell("transpose", value.name), value.shape[::-1])
        if kind == 1 and len(value.shape) == 2:
            flat = (value.shape[0] * value.shape[1],)
            return self.let(self.spell("reshape", value.name, value.name, flat[0]), flat)
        if kind == 2:
            return self.let(self.spell(self.pick("flip", "roll"), value.name), value.shape)
        return self.folded()

    def join(self) -> Value:
        a = self.vector()
        if self.chance(0.5):
            b = self.any(lambda v: v.shape == a.shape) or a
            axis, shape = self.pick((1, (2, *a.shape)), (-1, (*a.shape, 2)))
            return self.let(self.spell("stack", f"{a.name}, {b.name}", axis), shape)
        b = self.vector()
        text = self.spell("concat", f"{a.name}, {b.name}")
        return self.let(text, (a.shape[0] + b.shape[0],))

    def reduction(self) -> Value:
        value = self.any(lambda v: len(v.shape) >= 1) or self.product()
        axis = int(self.random.integers(1, len(value.shape) + 1))
        keep = self.chance(0.5)
        word = self.pick("sum", "mean", "max", "min", "var")
        shape = list(value.shape)
        shape[axis - 1 : axis] = [1] if keep else []
        place = self.pick(axis, axis - len(value.shape) - 1)
        return self.let(self.spell(word, value.name, place, keep), tuple(shape))

    def norm(self) -> Value:
        value = self.any(lambda v: len(v.shape) >= 1 and v.shape[-1] > 1) or self.product()
        kind = self.random.integers(4)
        if kind == 0:
            return self.let(self.spell("softmax", value.name), value.shape)
        if kind == 1:
            return self.let(self.spell("logsumexp", value.name), value.shape[:-1])
        if kind == 2:
            square = self.spell("mean", self.spell("square", value.name), -1, True)
            return self.let(
                f"{value.name} * {self.spell('rsqrt', square + ' + 0.01')}", value.shape
            )
        mean = self.let(self.spell("mean", value.name, -1, True), (*value.shape[:-1], 1))
        var = self.spell("var", value.name, -1, True)
        text = f"({value.name} - {mean.name}) / {self.spell('sqrt', var + ' + 0.01')}"
        text = f"({text}) * {self.weight(value.shape[-1])} + {self.weight(value.shape[-1])}"
        return self.let(text, value.shape)

    def widen(self) -> Value:
        """A value of less axes, or of size one, meets one of more."""
        value = self.any(lambda v: len(v.shape) >= 1) or self.product()
        few = self.any(lambda v: v.shape in (value.shape[:-1], (*value.shape[:-1], 1)))
        if few is None:
            few = self.let(self.spell("mean", value.name, -1, False), value.shape[:-1])
        column = few.name if len(few.shape) == len(value.shape) else f"{few.name}[..., None]"
        if self.chance(0.2) and len(value.shape) == 1:
            size = self.pick(2, 3)
            text = self.spell("broadcast", column, column, size)
            return self.let(text, (size,))
        return self.let(f"{value.name} {self.pick('+', '*', '-')} {column}", value.shape)

    def condition(self) -> Value:
        a = self.any() or self.values[0]
        b = self.any(lambda v: v.shape == a.shape)
        right = b.name if b and b != a and self.chance(0.5) else self.pick("0", "0.1", "-0.2")
        test = self.let(f"{a.name} {self.pick('>', '<', '>=', '<=')} {right}", a.shape, True)
        flags = [v for v in self.values if v.boolean and v.shape == test.shape and v != test]
        if flags and self.chance(0.3):
            text = self.spell("logical_and", test.name, self.pick(*flags).name)
            test = self.let(text, test.shape, True)
        if self.chance(0.2):
            test = self.let(self.spell("logical_not", test.name), test.shape, True)
        return test

    def choice(self) -> Value:
        test = self.condition()
        if self.chance(0.2):
            return self.let(self.spell("float", test.name), test.shape)
        a = self.any(lambda v: v.shape == test.shape)
        b = self.any(lambda v: v.shape == test.shape)
        if a is None or b is None:
            return self.let(self.spell("float", test.name), test.shape)
        other = self.spell("zeros", a.name) if self.chance(0.2) else b.name
        return self.let(self.spell("where", test.name, a.name, other), test.shape)

    def grow(self) -> Value:
        turns = (
            [self.product] * 4 + [self.elementwise] * 6 + [self.arithmetic] * 6 + [self.cut] * 3
            + [self.move, self.join, self.join, self.reduction, self.reduction, self.norm]
            + [self.widen, self.widen, self.choice, self.heads, self.folded]
        )  # fmt: skip
        return self.pick(*turns)()

    def shaped(self, shape: Shape) -> Value:
        """A bounded value of the shape of a state, from what there is."""
        value = self.any(lambda v: v.shape == shape)
        if value is None or self.chance(0.4):
            value = self.product()
            size = int(np.prod(shape))
            matrix = self.spell("matmul", value.name, self.weight(value.shape[0], size))
            value = self.let(self.spell("tanh", matrix), (size,))
            if not shape:
                value = self.let(f"{value.name}[:, 0]", ())
            elif len(shape) > 1:
                dims = ", ".join(map(str, shape))
                value = self.let(self.spell("reshape", value.name, value.name, dims), shape)
        return self.let(self.spell(self.pick("tanh", "sigmoid", "tanh"), value.name), shape)


def draw(framework: str, seed: int) -> tuple[Step, str]:
    """The random step number ``seed``, and the text of a function ``step(w, states, inputs)``."""
    step = Step(framework, np.random.default_rng(seed))
    shapes: list[Shape] = [(6,), (6,), (6,), (3,), (2,), ()]
    if framework != "tensorflow":
        shapes.append((2, 3))
    for k in range(step.pick(1, 1, 2, 2, 3)):
        step.states[f"s{k}"] = step.pick(*shapes) if k else step.pick((6,), (6,), (3,))
        if framework == "tensorflow" and not step.states[f"s{k}"]:
            step.states[f"s{k}"] = (1,)
    step.values += [Value(name, shape) for name, shape in step.states.items()]
    for k in range(step.pick(1, 1, 1, 2)):
        name = f"x{k}"
        step.inputs[name] = Value(name, step.pick((INPUT,), (INPUT,), (6,), (3,)))
        step.values.append(step.inputs[name])
    if step.chance(0.2):
        step.inputs["delta"] = Value("delta", ())
        step.values.append(step.inputs["delta"])
    resets = step.chance(0.25) and step.pick("where", "times")
    if resets:
        step.inputs["done"] = Value("done", (), True)
        for name, shape in step.states.items():
            flag = "done" + "[:, None]" * len(shape) if len(shape) < 2 else "done[:, None, None]"
            start = step.spell("zeros", name)
            if resets == "where":
                text = step.spell("where", flag, start, name)
            else:
                text = f"{name} * (1 - {step.spell('float', flag)})"
            step.lines.append(f"{name} = {text}")
    step.counts = framework in ("jax", "torch") and step.chance(0.15)
    for _ in range(step.random.integers(4, 18)):
        step.grow()
    new = {}
    for name, shape in step.states.items():
        value = step.shaped(shape)
        if step.chance(0.3):
            gate = step.shaped(shape)
            value = step.let(f"{name} + {gate.name} * ({value.name} - {name})", shape)
        if step.counts and step.chance(0.7):
            test = step.pick("t % 2 == 0", "t > 1", "t % 3 != 1")
            if framework == "torch":
                test = f"torch.as_tensor({test})"
            value = step.let(step.spell("where", test, value.name, name), shape)
        if resets and step.chance(0.1):
            flag = "done" + "[:, None]" * len(shape) if len(shape) < 2 else "done[:, None, None]"
            value = step.let(step.spell("where", flag, name, value.name), shape)
        new[name] = value.name
    outputs = [value.name for value in (step.any() for _ in range(step.pick(1, 1, 2))) if value]
    if framework == "tensorflow":
        outputs = outputs[:1]
    return step, source(step, new, outputs)


def source(step: Step, new: dict[str, str], outputs: list[str]) -> str:
    """The text of the step, as a function of dictionaries."""
    lines = [f"{name} = w[{name!r}]" for name in step.weights]
    lines += [f"{name} = states[{name!r}]" for name in step.states]
    lines += [f"{name} = inputs[{name!r}]" for name in step.inputs]
    lines += ["t = states['t']"] * step.counts + step.lines
    states = ", ".join(f"{name!r}: {value}" for name, value in new.items())
    states += ", 't': t + 1" * step.counts
    lines.append(f"return {{{states}}}, [{', '.join(outputs)}]")
    return "def step(w, states, inputs):\n" + "".join(f"    {line}\n" for line in lines)


def arrays(step: Step, seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Weights, initial states and inputs [T, B, ...] of a step."""
    random = np.random.default_rng([seed, 1])
    weights = {
        name: random.normal(size=shape) / max(shape[0] if shape else 1, 1) ** 0.5
        for name, shape in step.weights.items()
    }
    states: dict[str, Any] = {
        name: random.normal(size=(BATCH, *shape)) * 0.7 for name, shape in step.states.items()
    }
    inputs: dict[str, Any] = {}
    for name, value in step.inputs.items():
        if value.boolean:
            inputs[name] = random.random((STEPS, BATCH)) < 0.3
        else:
            inputs[name] = random.normal(size=(STEPS, BATCH, *value.shape)) * 0.7
    if step.counts:
        states["t"] = np.int32(0)
    return weights, states, inputs


# -- the frameworks -----------------------------------------------------------------------------
Results = dict[str, np.ndarray]


@dataclass
class Outcome:
    """What became of a step: how far it is off, by name, or why it was refused."""

    seed: int
    source: str
    wrong: dict[str, float]
    refusal: str | None
    error: str = ""


def compiled(text: str, seed: int, names: dict[str, Any]) -> Any:
    """The function of a text, whose lines errors can show."""
    place = f"<random step {seed}>"
    linecache.cache[place] = len(text), None, text.splitlines(True), place
    exec(compile(text, place, "exec"), names)
    return names["step"]


def cotangent(shape: Shape, number: int) -> np.ndarray:
    return np.random.default_rng([7, number]).normal(size=shape)


def on_jax(step: Step, text: str, seed: int) -> tuple[Any, Any]:
    """The runs of a step by the plain loop and through the door, which also says why it refuses."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    import anycell.jax as aj

    function = compiled(text, seed, {"jax": jax, "jnp": jnp, "lax": lax})
    exact = jax if hasattr(jax, "enable_x64") else jax.experimental

    def program(scan: Any) -> Any:
        def loss(weights: Any, moving: Any, floats: Any, counter: Any, rest: Any) -> Any:
            def body(carry: Any, x: Any) -> Any:
                return function(weights, carry, x)

            last, ys = scan(body, moving | counter, floats | rest)
            last = {k: v for k, v in last.items() if k != "t"}
            out = {f"output state {k}": v for k, v in last.items()}
            out |= {f"output {k}": v for k, v in enumerate(ys)}
            total = sum(jnp.sum(v * cotangent(v.shape, k)) for k, v in enumerate(out.values()))
            return total, out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

    programs = {scan: program(scan) for scan in (lax.scan, aj.scan)}

    def run(scan: Any, weights: Any, states: Any, inputs: Any) -> Results:
        floats = {k: jnp.asarray(v) for k, v in inputs.items() if v.dtype != bool}
        rest = {k: jnp.asarray(v) for k, v in inputs.items() if k not in floats}
        counter = {k: jnp.int32(v) for k, v in states.items() if k == "t"}
        moving = {k: jnp.asarray(v) for k, v in states.items() if k != "t"}
        weights = {k: jnp.asarray(v) for k, v in weights.items()}
        (_, out), slopes = programs[scan](weights, moving, floats, counter, rest)
        out = dict(out)
        for slope in slopes:
            out |= {f"gradient of {k}": v for k, v in slope.items()}
        return {k: np.asarray(v) for k, v in out.items()}

    def explain(weights: Any, states: Any, inputs: Any) -> str | None:
        weights, states, inputs = jax.tree.map(jnp.asarray, (weights, states, inputs))
        said = aj.explain_scan(functools.partial(function, weights), states, inputs)
        refused = "jax.lax.scan runs this body: "
        return said.removeprefix(refused) if said.startswith(refused) else None

    def plain(*trees: Any) -> Results:
        with exact.enable_x64(True):
            return run(lax.scan, *trees)

    def through_door(*trees: Any) -> tuple[Results, str | None]:
        with exact.enable_x64(True):
            return run(aj.scan, *trees), explain(*trees)

    return plain, through_door


def on_torch(step: Step, text: str, seed: int) -> tuple[Any, Any]:
    import torch
    import torch.nn.functional as F

    import anycell.torch as at

    function = compiled(text, seed, {"torch": torch, "F": F})

    class Cell(torch.nn.Module):
        def __init__(self, weights: Any) -> None:
            super().__init__()
            for name, value in weights.items():
                setattr(self, name, torch.nn.Parameter(torch.as_tensor(value)))

        def forward(self, inputs: Any, states: Any) -> Any:
            new, outputs = function(dict(self.named_parameters()), states, inputs)
            return tuple(outputs), new

    def plain(module: Any) -> Any:
        def run(inputs: Any, states: Any) -> Any:
            outputs = []
            for t in range(STEPS):
                output, states = module({k: v[t] for k, v in inputs.items()}, states)
                outputs.append(output)
            return tuple(torch.stack(each) for each in zip(*outputs, strict=True)), states

        return run

    def run(loop: Any, weights: Any, states: Any, inputs: Any) -> tuple[Results, Any]:
        module = Cell(weights)
        states = {k: torch.as_tensor(v) for k, v in states.items()}
        inputs = {k: torch.as_tensor(v) for k, v in inputs.items()}
        asked = {k: v for k, v in (states | inputs).items() if v.is_floating_point()}
        for value in asked.values():
            value.requires_grad_()
        asked |= dict(module.named_parameters())
        made = loop(module)
        ys, last = made(inputs, states)
        out = {f"output state {k}": v for k, v in last.items() if k != "t"}
        out |= {f"output {k}": v for k, v in enumerate(ys)}
        values = [*out.values(), *states.values()]  # some of which has a gradient
        total = sum(
            (v * torch.as_tensor(cotangent(tuple(v.shape), k))).sum() for k, v in enumerate(values)
        )
        slopes = torch.autograd.grad(total, list(asked.values()), allow_unused=True)
        results = {k: v.detach().numpy() for k, v in out.items()}
        for (name, value), slope in zip(asked.items(), slopes, strict=True):
            slope = torch.zeros_like(value) if slope is None else slope
            results[f"gradient of {name}"] = slope.detach().numpy()
        return results, made

    def through_door(*trees: Any) -> Any:
        results, made = run(at.loop, *trees)
        engine = made.engine
        return results, engine.reason if engine.name == "torch" else None

    return lambda *trees: run(plain, *trees)[0], through_door


def on_tensorflow(step: Step, text: str, seed: int) -> tuple[Any, Any]:
    import keras
    import tensorflow as tf

    import anycell.keras as ak
    from anycell.read.short import MOST

    MOST["tensorflow"] = 0  # kernels run short sequences too
    function = compiled(text, seed, {"tf": tf, "keras": keras})
    features = [int(np.prod(value.shape)) for value in step.inputs.values()]

    class Cell(keras.layers.Layer):
        @property
        def state_size(self) -> list[int]:
            return [shape[0] for shape in step.states.values()]

        def build(self, _: Any) -> None:
            self.w = {k: self.add_weight(shape=v, name=k) for k, v in step.weights.items()}

        def call(self, x: Any, states: Any) -> Any:
            parts = tf.split(x, features, axis=-1)
            inputs = {}
            for part, value in zip(parts, step.inputs.values(), strict=True):
                part = part if value.shape else part[:, 0]
                inputs[value.name] = part > 0.5 if value.boolean else part
            states = dict(zip(step.states, states, strict=True))
            new, outputs = function(self.w, states, inputs)
            return outputs[0], list(new.values())

    def run(rnn: Any, weights: Any, states: Any, inputs: Any) -> tuple[Results, Any]:
        options = {"return_sequences": True, "return_state": True, "dtype": "float64"}
        layer = rnn(Cell(dtype="float64"), **options)
        x = np.concatenate(
            [inputs[k].astype(float).reshape(STEPS, BATCH, -1) for k in step.inputs], axis=-1
        )
        x, start = tf.constant(x.swapaxes(0, 1)), [tf.constant(v) for v in states.values()]
        layer(x, initial_state=start)
        for name, value in weights.items():
            layer.cell.w[name].assign(value)
        values = [layer.cell.w[name].value for name in weights]

        def both() -> Any:
            with tf.GradientTape() as tape:
                tape.watch([x, *start])
                out = layer(x, initial_state=start)
                pairs = [tf.reduce_sum(v * cotangent(v.shape, k)) for k, v in enumerate(out)]
                total = tf.add_n(pairs)
            return out, tape.gradient(
                total, [x, *start, *values], unconnected_gradients=tf.UnconnectedGradients.ZERO
            )

        # In a graph TensorFlow 2.21 returns empty arrays from Keras's loop if no x enters the step.
        out, slopes = (both if rnn is keras.layers.RNN else tf.function(both))()
        results = {f"output {k}": v.numpy() for k, v in enumerate(out)}
        for name, slope in zip(["x", *states, *weights], slopes, strict=True):
            results[f"gradient of {name}"] = tf.convert_to_tensor(slope).numpy()
        return results, layer

    def through_door(*trees: Any) -> Any:
        results, layer = run(ak.RNN, *trees)
        engine = layer.engine
        return results, engine.reason if engine.name == "keras" else None

    return lambda *trees: run(keras.layers.RNN, *trees)[0], through_door


def on_numpy(step: Step, text: str, seed: int) -> tuple[Any, Any]:
    from anycell.numpy import loop
    from anycell.read.short import MOST

    MOST.update({"numpy": 0, "numpy recorded": 0})  # kernels run short sequences too
    function = compiled(text, seed, {"np": np})

    def run(fused: bool, weights: Any, states: Any, inputs: Any) -> tuple[Results, Any]:
        def one(x: Any, state: Any) -> Any:
            new, outputs = function(weights, state, x)
            return outputs, new

        door = loop(one)
        with np.errstate(all="ignore"):
            for _ in range(3 * fused):  # recorded, replayed, as replayed
                ys, last = door(inputs, states)
            if not fused:
                ys, last = door._loop(inputs, states)
        results = {f"output state {k}": v for k, v in last.items()}
        return results | {f"output {k}": v for k, v in enumerate(ys)}, door.reason

    return lambda *trees: run(False, *trees)[0], lambda *trees: run(True, *trees)


ON: dict[str, Callable[[Step, str, int], tuple[Any, Any]]] = {
    "jax": on_jax,
    "torch": on_torch,
    "tensorflow": on_tensorflow,
    "numpy": on_numpy,
}


def differences(
    plain: Callable[..., Results], expected: Results, ours: Results, trees: Any
) -> dict[str, float]:
    """The relative errors of results that are off by more than the plain loop is itself, when all
    of its numbers are off by a rounding each.
    """
    assert set(ours) == set(expected), f"{set(ours) ^ set(expected)} on one side only"
    largest = max(np.abs(v).max(initial=0.0) for v in expected.values())
    off = {}
    for name, ref in expected.items():
        error = np.abs(ours[name] - ref).max(initial=0.0)
        error = error if ours[name].shape == ref.shape else np.inf
        most = LIMITS[name.split()[0]] * np.abs(ref).max(initial=0.0) + 1e-15 * largest
        if not error <= most:
            off[name] = error
    if not off:
        return {}
    noise = dict.fromkeys(off, 0.0)
    for k in range(4):
        random = np.random.default_rng(k)

        def nudged(tree: Any, random: Any = random) -> Any:
            return {
                name: v * (1 + 2.0**-52 * random.normal(size=v.shape)) if v.dtype == float else v
                for name, v in ((name, np.asarray(v)) for name, v in tree.items())
            }

        moved = plain(*map(nudged, trees))
        for name in noise:
            noise[name] = max(noise[name], np.abs(moved[name] - expected[name]).max(initial=0.0))
    return {
        name: float(error / (np.abs(expected[name]).max(initial=0.0) or 1.0))
        for name, error in off.items()
        if not error <= ROUNDINGS * noise[name]
    }


def check(framework: str, seed: int) -> Outcome:
    """Draws a step, runs it by both roads and compares."""
    step, text = draw(framework, seed)
    plain, ours = ON[framework](step, text, seed)
    trees = arrays(step, seed)
    expected = plain(*trees)
    if not all(np.isfinite(v).all() for v in expected.values()):
        return Outcome(seed, text, {}, "the loop's own results are not finite")
    try:
        results, reason = ours(*trees)
    except Exception as error:  # of any kind: the door must never fail where the loop runs
        return Outcome(seed, text, {}, None, f"{type(error).__name__}: {error}")
    return Outcome(seed, text, differences(plain, expected, results, trees), reason)


def kind(reason: str) -> str:
    """A refusal without its file, line and numbers."""
    reason = re.sub(r"<random step \d+>:\d+|\S+\.py:\d+", "", reason)
    return re.sub(r"\d+", "N", " ".join(reason.split()))[:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=np.inf, help="start no step after them")
    parser.add_argument("--quick", action="store_true", help="let XLA optimize nothing")
    parser.add_argument("--source", action="store_true", help="print every step, and run none")
    options = parser.parse_args()
    os.environ |= QUICK if options.quick else {}
    if options.source:
        for seed in range(options.seed, options.seed + options.count):
            print(f"# seed {seed}\n{draw(options.framework, seed)[1]}")
        return 0
    read, bad, start = 0, 0, time.monotonic()
    reasons: dict[str, list[int]] = collections.defaultdict(list)
    for seed in range(options.seed, options.seed + options.count):
        if time.monotonic() - start > options.seconds:
            break
        outcome = check(options.framework, seed)
        if outcome.wrong or outcome.error:
            bad += 1
            about = outcome.error or ", ".join(f"{k}: {v:.1e}" for k, v in outcome.wrong.items())
            print(f"WRONG, seed {outcome.seed}: {about}\n{outcome.source}", flush=True)
        elif outcome.refusal:
            reasons[kind(outcome.refusal)].append(outcome.seed)
        else:
            read += 1
    refused = sum(map(len, reasons.values()))
    print(f"{options.framework}: {read} read, {refused} refused, {bad} wrong")
    for reason, seeds in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"  {len(seeds)} (seeds {', '.join(map(str, seeds[:3]))}): {reason}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
