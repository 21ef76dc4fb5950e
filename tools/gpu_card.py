"""Describes the card and its environment: prints lines of JSON, each as soon as it is known.

    python tools/gpu_card.py

The exit status is 3 if PyTorch sees no card, and 1 if the card does not multiply two matrices.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time

from gpu_lines import host_of_card, need_card, say, spelled

ASKED = (
    "name,driver_version,compute_mode,mig.mode.current,ecc.mode.current,persistence_mode,"
    "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit,"
    "memory.total,memory.used"
)
PACKAGES = ("numpy", "pytest", "pytest-xdist", "matplotlib", "keras", "llvmlite", "hypothesis")
NO_CARD = 3


def main() -> None:
    """Prints the description, the quickest parts first."""
    say({"python": platform.python_version(), "machine": platform.machine(),
         "cores": os.cpu_count(), "kernel": platform.release(),
         "packages": {name: version(name) for name in PACKAGES}})  # fmt: skip
    say({"nvidia_smi": nvidia_smi(), "mps": mps(), "sanitizer": shutil.which("compute-sanitizer")})
    begin = time.monotonic()
    import torch

    seconds = round(time.monotonic() - begin, 1)
    say({"torch": torch.__version__, "cuda": torch.version.cuda, "import_seconds": seconds,
         "triton": version("triton") or version("pytorch-triton")})  # fmt: skip
    need_card("gpu_card", NO_CARD)
    card = torch.cuda.get_device_properties(0)
    say({"card": card.name, "capability": 10 * card.major + card.minor,
         "processors": card.multi_processor_count, "memory": card.total_memory,
         "cudnn": torch.backends.cudnn.version()})  # fmt: skip
    a = torch.full((256, 256), 2.0, device="cuda", dtype=torch.bfloat16)
    say({"multiplies": bool(((a @ a) == 1024).all())})
    say({"device": spelled(host_of_card(torch.bfloat16).limits)})
    begin = time.monotonic()
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        b @ b
    torch.cuda.synchronize()
    say({"busy": nvidia_smi(), "matmul_seconds": round(time.monotonic() - begin, 2)})


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_smi() -> dict[str, str] | str:
    """The output of nvidia-smi by field, or a text if it fails."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    values = said.stdout.partition("\n")[0].split(", ")
    names = ASKED.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else said.stdout


def mps() -> str:
    """Whether cards are shared through CUDA's Multi-Process Service."""
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return f"a pipe at {pipe}" if os.path.exists(pipe) else "none"


if __name__ == "__main__":
    main()
