"""Trains an encoder and a decoder with teacher forcing; then the decoder reads its own output.

    python examples/keras_translate.py           (--quick: a few seconds)

The task is to write numbers backwards, digit by digit. In training, one call runs the decoder over
the whole target. Afterwards, `layer.cell` makes one step at a time, and each digit that it writes
is its next input.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from keras import ops

import anycell.keras
from anycell import cells

START, DIGITS = 10, 11  # the start symbol, and the number of symbols


def data(count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, and the same numbers backwards, both ``[N, length]``."""
    x = np.random.default_rng(3).integers(0, 10, (count, length))
    return x, x[:, ::-1].copy()


class Translator:
    """The layers, as a model to train and as a decoder that runs on its own."""

    def __init__(self, units: int) -> None:
        self.embed = keras.layers.Embedding(DIGITS, 16)
        self.encode = anycell.keras.PeepholeLSTM(units, return_state=True)
        self.decode = anycell.keras.RNN(cells.PeepholeLSTM, units, return_sequences=True)
        self.choose = keras.layers.Dense(DIGITS)
        source, before = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
        _, *state = self.encode(self.embed(source))
        logits = self.choose(self.decode(self.embed(before), initial_state=state))
        self.model = keras.Model([source, before], logits)

    def write(self, source: np.ndarray, length: int) -> np.ndarray:
        """Returns the decoder's output when it reads its own output."""
        _, *state = self.encode(self.embed(source))
        word, written = np.full(len(source), START), []
        for _ in range(length):
            output, state = self.decode.cell(self.embed(word), state)
            word = ops.convert_to_numpy(ops.argmax(self.choose(output), axis=-1))
            written.append(word)
        return np.stack(written, axis=1)


def main(arguments: list[str] | None = None) -> float:
    """Trains; prints and returns the share of right digits without teacher forcing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    quick = parser.parse_args(arguments).quick
    keras.utils.set_random_seed(1)
    length = 3 if quick else 8
    x, y = data(2000 if quick else 20000, length)
    before = np.concatenate([np.full((len(y), 1), START), y[:, :-1]], axis=1)
    split = int(0.9 * len(x))
    translator = Translator(48 if quick else 96)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    translator.model.compile(keras.optimizers.Adam(0.01), loss)
    given, right = [x[:split], before[:split]], y[:split]
    translator.model.fit(given, right, batch_size=64, epochs=6 if quick else 15, verbose=0)
    written = translator.write(x[split:], length)
    score = float(np.mean(written == y[split:]))
    print(f"{x[split]} -> {written[0]}; digits right without a teacher: {score:.0%}")
    return score


if __name__ == "__main__":
    main()
