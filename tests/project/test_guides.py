"""The guides' own programs: the agent that must remember, recipes, and notebooks."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from processes import load, run
from tolerances import assert_close

from tests.project.test_docs import blocks

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
AGENT = "docs/guides/reinforcement-learning.md"
DEPLOYING = "docs/guides/deploying.md"
RECIPES = "docs/guides/reinforcement-learning-libraries.md"


@pytest.fixture(scope="module")
def recall() -> Any:
    return load("examples/recall.py")


def test_the_page_shows_the_example() -> None:
    text = (ROOT / "examples" / "recall.py").read_text(encoding="utf-8")
    assert len(blocks(AGENT)) == 3
    assert all(block in text for block in blocks(AGENT))


def test_the_update_sees_what_the_rollout_saw(recall: Any) -> None:
    """In the second rollout too, which begins within episodes."""
    policy, environment = recall.Policy(), recall.Recall(recall.ROWS)
    begin = state = tuple(torch.zeros(2, 1, recall.ROWS, recall.UNITS))
    for _ in range(2):
        begin = state
        (x, first, action, log_prob, value, _), _, state = recall.rollout(
            policy, environment, begin
        )
        choice, now = policy(x, begin, first)
        found = (choice.log_prob(action), log_prob), (now, value)
        for again, seen in found:
            assert_close(again.detach().numpy(), seen.numpy(), "float32", "forward")
    assert first[1:].any() and not first[0].all()


def test_an_answer_needs_the_cue(recall: Any) -> None:
    environment, cue, right = recall.Recall(8), torch.zeros(8), []
    for _ in range(40):
        x, first = environment.x, environment.first
        cue = torch.where(first, x[:, 0], cue)
        assert not x[~first, 0].any()
        asks = x[:, 1] == 1
        reward = environment.act((cue > 0).long())
        assert reward[asks].all() and not reward[~asks].any()
        right.append(reward.sum())
    assert sum(right) > 8


@pytest.mark.slow
def test_memory_is_learned(recall: Any) -> None:
    remembers, guesses = recall.main(["--quick"])
    assert remembers > 0.9
    assert guesses < 0.6


# What a recipe is held against: the method of the library that it replaces.
STABLE_BASELINES = """
lstm, rows = model.policy.lstm_actor, 5
x, first = torch.randn(60, lstm.input_size), torch.rand(60) < 0.2
states = tuple(torch.randn(2, 1, rows, lstm.hidden_size))
for x, first in (x, first.float()), (x[:rows], first[:rows].float()):
    with torch.no_grad():
        ours = FusedPolicy._process_sequence(x, states, first, lstm)
    theirs = RecurrentActorCriticPolicy._process_sequence(x, states, first, lstm)
    for a, b in zip((ours[0], *ours[1]), (theirs[0], *theirs[1])):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
"""
TORCHRL = """
theirs = LSTMModule(lstm=lstm, in_key="observation", out_key="features")
with set_recurrent_mode(True):
    ours, theirs = memory(rollout[None].clone()), theirs(rollout[None].clone())
assert rollout["is_init"][1:].any()
assert torch.allclose(ours["features"], theirs["features"], atol=1e-5)
for key in memory.out_keys[1:]:  # theirs is right where a sequence ends
    assert torch.allclose(ours[key], rollout[None][key], atol=1e-5)
"""
CLEANRL = """
import torch
import anycell.torch


class Agent(torch.nn.Module):
    get_states = get_states

    def __init__(self):
        super().__init__()
        self.network, self.lstm = torch.nn.Linear(3, 4), anycell.torch.LSTM(4, 8)

    def loop(self, x, lstm_state, done):  # CleanRL's, ppo_atari_lstm.py
        hidden = self.network(x / 255.0)
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done):
            kept = tuple((1.0 - d).view(1, -1, 1) * s for s in lstm_state)
            h, lstm_state = self.lstm(h.unsqueeze(0), kept)
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state


agent, states = Agent(), tuple(torch.randn(2, 1, 5, 8))
given = 255 * torch.randn(60, 3), states, (torch.rand(60) < 0.2).float()
ours, theirs = agent.get_states(*given), agent.loop(*given)
for a, b in zip((ours[0], *ours[1]), (theirs[0], *theirs[1])):
    assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
"""


@pytest.mark.parametrize(
    "library, number, check",
    [
        pytest.param("sb3_contrib", 0, STABLE_BASELINES, marks=pytest.mark.slow),
        pytest.param("torchrl", 1, TORCHRL, marks=pytest.mark.slow),
        ("torch", 2, CLEANRL),
    ],
)
def test_a_recipe_is_what_it_replaces(
    library: str, number: int, check: str, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    script = tmp_path / "recipe.py"
    script.write_text(blocks(RECIPES)[number] + check, encoding="utf-8")
    run(str(script), paths=[ROOT])


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_been_run(path: Path) -> None:
    """From top to bottom, after its last change, without an error or a warning."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert path.stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    pytest.importorskip("nbclient")
    assert "cells have run" in run("tools/notebooks.py", path.stem, "--check")


@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_rollout_in_jax(count: int) -> None:
    """The page's own program, whose ratio is 1 where an update begins; its last block has seeds."""
    pytest.importorskip("jax")
    names: dict[str, Any] = {}
    for block in blocks("docs/guides/reinforcement-learning-jax.md")[:count]:
        exec(block, names)


@pytest.mark.slow
def test_files_for_onnx_runtime(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    first, *_ = blocks(DEPLOYING)
    _, steps, whole, _ = blocks(DEPLOYING, "py")
    check = """
    right = layer(torch.from_numpy(x))[0][-1:].detach().numpy()
    print(abs(y - right).max() < 1e-6, torch.allclose(output, gru(torch.from_numpy(x))[0]))
    """
    script = tmp_path / "files.py"
    check = textwrap.dedent(check)
    last = "print(abs(output - layer(x)[0].detach().numpy()).max() < 1e-2)"
    script.write_text(first + steps + check + whole + last, encoding="utf-8")
    printed = run(str(script), cwd=tmp_path)
    assert "True True" in printed and printed.splitlines()[-1] == "True"
    nodes = [node.op_type for node in onnx.load(tmp_path / "lstm-8-bits.onnx").graph.node]
    assert "DynamicQuantizeLSTM" in nodes and len(nodes) < 5
    sizes = [(tmp_path / f"{name}.onnx").stat().st_size for name in ("lstm", "lstm-8-bits")]
    assert 24_000 < sizes[0] < 28_000 and 9_000 < sizes[1] < 11_000


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "size"), [("LSTM", 27_000), ("PeepholeLSTM", 35_000)])
def test_a_file_for_tflite(layer: str, size: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    *_, convert = blocks(DEPLOYING, "py")
    check = """
    import numpy as np
    interpreter = tf.lite.Interpreter(model_content=file)
    interpreter.allocate_tensors()
    (entry,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    x = np.random.default_rng(0).normal(size=(1, 20, 3)).astype("float32")
    interpreter.set_tensor(entry["index"], x)
    interpreter.invoke()
    got = interpreter.get_tensor(result["index"])
    print(len(file), abs(got - keras.ops.convert_to_numpy(model(x))).max() < 1e-6)
    """
    script = tmp_path / "file.py"
    code = convert.replace("keras.PeepholeLSTM", f"keras.{layer}") + textwrap.dedent(check)
    code = f"import anycell\n{code}"
    script.write_text(code, encoding="utf-8")
    bytes_, right = run(str(script), cwd=tmp_path, KERAS_BACKEND="tensorflow").split()[-2:]
    assert right == "True" and 0.9 * size < int(bytes_) < 1.1 * size
