"""Models of published projects whose recurrent layers read what convolutions have written.

Convolutions put time last, recurrent layers want it first: what they are given is a view. Each
model has its project's layers and its way of turning the axes, with fewer channels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Demucs(nn.Module):
    """Music source separation (Défossez et al., 2019): a U-net with a BLSTM at its bottom."""

    def __init__(self, channels: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        before, width = 1, channels
        for k in range(depth):
            self.encoder.append(
                nn.Sequential(
                    nn.Conv1d(before, width, 8, 4),
                    nn.ReLU(),
                    nn.Conv1d(width, 2 * width, 1),
                    nn.GLU(1),
                )
            )
            last: list[nn.Module] = [nn.ReLU()] if k else []
            up = nn.ConvTranspose1d(width, before if k else 2, 8, 4)
            context = nn.Conv1d(width, 2 * width, 3)
            self.decoder.insert(0, nn.Sequential(context, nn.GLU(1), up, *last))
            before, width = width, 2 * width
        self.lstm = nn.LSTM(before, before, 2, bidirectional=True)
        self.linear = nn.Linear(2 * before, before)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encode in self.encoder:
            x = encode(x)
            skips.append(x)
        x = self.linear(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for decode in self.decoder:
            skip = skips.pop()
            trim = skip.shape[-1] - x.shape[-1]
            x = decode(x + skip[..., trim // 2 : skip.shape[-1] - (trim - trim // 2)])
        return x


class _SLSTM(nn.Module):
    """Encodec's: layers of an LSTM with a skip, on ``[batch, channels, time]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1)
        y, _ = self.lstm(x)
        return (y + x).permute(1, 2, 0)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.ELU(),
            nn.Conv1d(width, width // 2, 3, padding=1),
            nn.ELU(),
            nn.Conv1d(width // 2, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Encodec(nn.Module):
    """Audio codec (Défossez et al., 2022): its SEANet encoder and decoder, nothing quantized."""

    def __init__(self, channels: int = 8, ratios: tuple[int, ...] = (2, 4)) -> None:
        super().__init__()
        width = channels
        down: list[nn.Module] = [nn.Conv1d(1, width, 7, padding=3)]
        for ratio in ratios:
            conv = nn.Conv1d(width, 2 * width, 2 * ratio, ratio, padding=ratio // 2)
            down += [_Residual(width), nn.ELU(), conv]
            width *= 2
        up: list[nn.Module] = [nn.Conv1d(width, width, 7, padding=3), _SLSTM(width)]
        for ratio in reversed(ratios):
            conv = nn.ConvTranspose1d(width, width // 2, 2 * ratio, ratio, padding=ratio // 2)
            width //= 2
            up += [nn.ELU(), conv, _Residual(width)]
        self.encoder = nn.Sequential(*down, _SLSTM(channels * 2 ** len(ratios)), nn.ELU())
        self.decoder = nn.Sequential(*up, nn.ELU(), nn.Conv1d(width, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class CRNN(nn.Module):
    """Text in images (Shi et al., 2015), for CTC: a column of the image is a step."""

    def __init__(self, width: int = 32, classes: int = 11) -> None:
        super().__init__()
        half = width // 2
        self.cnn = nn.Sequential(
            nn.Conv2d(1, half, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(half, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
            nn.Conv2d(width, width, (2, 1)),
            nn.ReLU(),
        )
        self.first = nn.LSTM(width, width, bidirectional=True)
        self.between = nn.Linear(2 * width, width)
        self.second = nn.LSTM(width, width, bidirectional=True)
        self.classes = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cnn(x).squeeze(2).permute(2, 0, 1)
        for rnn, linear in ((self.first, self.between), (self.second, self.classes)):
            y, _ = rnn(x)
            x = linear(y.flatten(0, 1)).unflatten(0, y.shape[:2])
        return x


class Speech(nn.Module):
    """Deep Speech 2 (Amodei et al., 2015), in one dimension: spectrum in, characters out."""

    def __init__(self, kind: Callable[..., nn.RNNBase], bands: int = 20, width: int = 32) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv1d(bands, width, 5, 2, padding=2, bias=False),
            nn.BatchNorm1d(width),
            nn.Hardtanh(0, 20),
        )
        self.rnn = kind(width, width, num_layers=2, batch_first=True)
        self.characters = nn.Linear(width, 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.characters(self.rnn(self.cnn(x).transpose(1, 2))[0]).transpose(0, 1)


def ctc(output: Tensor) -> Tensor:
    """The loss of scores ``[time, batch, classes]`` against texts drawn anew, always the same."""
    steps, rows, classes = output.shape
    draw = torch.Generator().manual_seed(3)
    texts = torch.randint(1, classes, (rows, 4), generator=draw)
    lengths = [torch.full((rows,), n, dtype=torch.long) for n in (steps, 4)]
    return F.ctc_loss(output.log_softmax(-1), texts, *lengths)


def projected(output: Tensor) -> Tensor:
    """A random sum of the outputs, always the same."""
    draw = torch.Generator().manual_seed(3)
    return (output * torch.randn(output.shape, generator=draw).to(output)).sum()


Loss = Callable[[Tensor], Tensor]
# The model, its loss, and inputs whose recurrent layers see fewer than 256 rows in all, and more.
MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, tuple[tuple[int, ...], ...]]] = {
    "demucs": (Demucs, projected, ((2, 1, 340), (6, 1, 1012))),
    "encodec": (Encodec, projected, ((2, 1, 96), (4, 1, 640))),
    "CRNN": (CRNN, ctc, ((2, 1, 8, 40), (9, 1, 8, 64))),
    "speech, LSTM": (lambda: Speech(nn.LSTM), ctc, ((2, 20, 40), (4, 20, 200))),
    "speech, GRU": (lambda: Speech(nn.GRU), ctc, ((2, 20, 40), (4, 20, 200))),
}
