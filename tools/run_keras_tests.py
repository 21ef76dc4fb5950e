"""Runs Keras's own tests of its recurrent layers with our layers in their place.

    python tools/run_keras_tests.py [arguments of pytest]

The tests come with the installed Keras; none of their code is here. Before they are imported, our
`LSTM`, `GRU`, `SimpleRNN` and their cells replace Keras's in its modules. `EXCLUDED` and
docs/compatibility.md list the tests that are left out, with reasons.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest
from keras.src import layers
from keras.src.layers import rnn

import anycell.keras

OURS = ("LSTM", "GRU", "SimpleRNN", "LSTMCell", "GRUCell", "SimpleRNNCell")
FILES = (
    "lstm", "gru", "simple_rnn", "rnn", "bidirectional", "time_distributed", "stacked_rnn_cells",
    "dropout_rnn_cell",
)  # fmt: skip
_CUDNN = "use_cudnn='auto' becomes False where our kernels run, or Bidirectional would pass them by"
# Reasons by the end of a test's name.
EXCLUDED = {
    "::test_keeps_use_cudnn": _CUDNN,
    "::test_fused_lstm_eligibility": _CUDNN,
    "::test_fused_gru_eligibility": _CUDNN,
}


class Substitute:
    """Replaces Keras's layers by ours in the modules that Keras's tests use."""

    def __init__(self) -> None:
        for name in OURS:
            ours, theirs = getattr(anycell.keras, name), getattr(layers, name)
            for module in (keras.layers, layers, *self._modules()):
                if getattr(module, name, None) is theirs:
                    setattr(module, name, ours)

    def _modules(self) -> list[object]:
        """The imported test modules of Keras, which may have layers by `from ... import`."""
        return [m for n, m in sys.modules.items() if n.startswith("keras") and n.endswith("_test")]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for name, reason in EXCLUDED.items():
                if item.nodeid.endswith(name):
                    item.add_marker(pytest.mark.skip(reason=reason))


def main() -> int:
    home = Path(rnn.__file__).parent
    files = [str(home / f"{name}_test.py") for name in FILES]
    given = ["-p", "no:cacheprovider", "--rootdir", str(home), "-c", os.devnull, "-q", "-rs"]
    return int(pytest.main([*given, *files, *sys.argv[1:]], plugins=[Substitute()]))


if __name__ == "__main__":
    sys.exit(main())
