"""Recurrent models of real projects, written with ``nn.LSTM`` and ``nn.GRU`` from their published
sizes. The parts around the recurrent layers are simplified; none of the projects' code is used.

Each model takes a shape of ``anycell.bench.shapes``, and has ``inputs`` features and ``outputs``
values per step; ``loss(prediction, target)`` takes targets in [-1, 1].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycell.bench.shapes import Shape


class Model(nn.Module):
    """A model from ``[B, T, inputs]`` to ``[B, T, outputs]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(prediction, target)


class DeepAR(Model):
    """GluonTS: the parameters of Student's t for each next value (Salinas et al., 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.I, 1)
        self.lstm = nn.LSTM(shape.I, shape.H, shape.L, batch_first=True, dropout=0.1)
        self.parameters_of_t = nn.Linear(shape.H, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.parameters_of_t(self.lstm(x)[0])

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        freedom, place, scale = prediction.unbind(-1)
        t = torch.distributions.StudentT(2 + F.softplus(freedom), place, F.softplus(scale))
        return -t.log_prob(target.squeeze(-1)).mean()


class AmpModel(Model):
    """Neural Amp Modeler: a guitar amplifier, sample by sample (Wright et al., 2019)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.I, 1)
        self.lstm = nn.LSTM(shape.I, shape.H, shape.L, batch_first=True)
        self.head = nn.Linear(shape.H, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class PyanNet(Model):
    """pyannote.audio: who speaks when, on the features of its filter bank (Bredin, 2023)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.I, 7)
        self.lstm = nn.LSTM(shape.I, shape.H, shape.L, bidirectional=True, batch_first=True)
        self.linear = nn.ModuleList([nn.Linear(2 * shape.H, 128), nn.Linear(128, 128)])
        self.classifier = nn.Linear(128, 7)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        for linear in self.linear:
            x = F.leaky_relu(linear(x))
        return self.classifier(x).log_softmax(-1)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(prediction.flatten(0, 1), target.argmax(-1).flatten())


class CudaLSTM(Model):
    """NeuralHydrology: the runoff of a catchment from its weather (Kratzert et al., 2018)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.I, 1)
        self.lstm = nn.LSTM(shape.I, shape.H)
        nn.init.constant_(self.lstm.bias_hh_l0[shape.H : 2 * shape.H], 3.0)  # the forget gate's
        self.head = nn.Sequential(nn.Dropout(0.4), nn.Linear(shape.H, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.transpose(0, 1))[0]).transpose(0, 1)


class DeepFilterNet(Model):
    """DeepFilterNet: a mask over 32 bands of noisy speech, by a GRU (Schröter et al., 2022)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(32, 32)
        self.encoder = nn.Sequential(nn.Linear(32, shape.I), nn.ReLU())
        self.gru = nn.GRU(shape.I, shape.H, shape.L, batch_first=True)
        self.mask = nn.Sequential(nn.Linear(shape.H, 32), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask(self.gru(self.encoder(x))[0])


class OpenUnmix(Model):
    """Open-Unmix: one instrument of a mix, as a mask over its spectrum (Stöter et al., 2019)."""

    def __init__(self, shape: Shape, bands: int = 1487) -> None:
        super().__init__(bands, bands)
        self.encoder = nn.Linear(bands, shape.I, bias=False)
        half, width = shape.I // 2, shape.I
        self.lstm = nn.LSTM(width, half, shape.L, bidirectional=True, dropout=0.4)
        self.decoder = nn.ModuleList(
            [nn.Linear(2 * width, width, bias=False), nn.Linear(width, bands, bias=False)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm1d(n) for n in (width, width, bands)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.norms
        mix, (rows, steps, _) = x, x.shape
        x = first(self.encoder(x.transpose(0, 1)).flatten(0, 1)).tanh()
        output, _ = self.lstm(x.unflatten(0, (steps, rows)))
        x = torch.cat([x, output.flatten(0, 1)], -1)
        x = last(self.decoder[1](F.relu(second(self.decoder[0](x)))))
        return mix * F.relu(x).unflatten(0, (steps, rows)).transpose(0, 1)


MODELS: dict[str, type[Model]] = {  # by the name of their shape
    "deepar": DeepAR,
    "amp-model": AmpModel,
    "pyannote": PyanNet,
    "hydrology": CudaLSTM,
    "denoise": DeepFilterNet,
    "unmix": OpenUnmix,
}
