"""Classifies padded and masked text: which library does a sentence of documentation come from?

    python examples/keras_text.py                (--quick: a few seconds)

The text is the docstrings of the installed NumPy and Keras. Words become numbers, 0 is padding, and
`Embedding(mask_zero=True)` tells the layers where a sentence ends.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import keras
import numpy as np

import anycell.keras


def sentences(module: ModuleType) -> Iterator[list[str]]:
    """Yields sentences of five or more words from the docstrings of a module's public names."""
    for name in sorted(vars(module)):
        text = getattr(module, name).__doc__ if not name.startswith("_") else None
        for sentence in re.split(r"[.:]\s", text if isinstance(text, str) else ""):
            words = re.findall(r"[a-z]+", sentence.lower())
            if len(words) >= 5:
                yield words


def data(quick: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """Numbered words ``[N, T]``, padded with 0, labels ``[N]``, and the number of words."""
    texts = [list(sentences(np)), list(sentences(keras.layers)) + list(sentences(keras.ops))]
    most = 300 if quick else min(map(len, texts))
    rng = np.random.default_rng(0)
    chosen = [(words, label) for label, text in enumerate(texts) for words in text]
    chosen = [chosen[i] for i in rng.permutation(len(chosen))][: 2 * most]
    own = {"numpy", "np", "ndarray", "keras", "tensor", "tensors", "layer", "layers"}
    counts = Counter(word for words, _ in chosen for word in words if word not in own)
    known = {word: k + 2 for k, (word, _) in enumerate(counts.most_common(2000))}
    longest = 40
    x = np.zeros((len(chosen), longest), "int32")
    for row, (words, _) in enumerate(chosen):
        numbers = [known.get(word, 1) for word in words[:longest]]
        x[row, : len(numbers)] = numbers
    return x, np.array([label for _, label in chosen]), len(known) + 2


def main(arguments: list[str] | None = None) -> float:
    """Trains; prints the accuracy on held-out sentences, returns its gain over a constant guess."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    quick = parser.parse_args(arguments).quick
    keras.utils.set_random_seed(1)
    x, y, words = data(quick)
    split = int(0.8 * len(x))
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(words, 32, mask_zero=True),
            keras.layers.Bidirectional(anycell.keras.GRU(24, return_sequences=True)),
            anycell.keras.LayerNormLSTM(24),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy", metrics=["accuracy"])
    model.fit(x[:split], y[:split], batch_size=32, epochs=3 if quick else 6, verbose=0)
    _, right = model.evaluate(x[split:], y[split:], verbose=0)
    most = max(np.mean(y[split:]), 1 - np.mean(y[split:]))
    print(f"{len(x)} sentences, {words} words: {right:.0%} right; always the same: {most:.0%}")
    return float(right - most)


if __name__ == "__main__":
    main()
