"""Builds the wheel and the source distribution, and tries them as a user's pip does.

    python tools/distributions.py                          build, twine check, check-wheel-contents
    python tools/distributions.py --try python3.10 python3.13
        installs each in a new environment of each Python; runs `anycell doctor` and the start page
    python tools/distributions.py --try python3.12 --extra torch --extra jax
        adds these extras, and the start pages of their frameworks
    python tools/distributions.py --try python3.10 --extra torch --oldest
        with the versions of requirements/oldest.txt

It needs the dependency group `release`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The start page that trains with each extra; the first needs no extra.
PAGES = {"": "numpy", "torch": "pytorch", "keras": "", "tensorflow": "keras", "jax": "jax"}
PAGES |= {"tensorflow-cpu": "keras"}


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command and returns its output; ends the program with the output if it fails."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **environment}
    env = clean if environment else None
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(dist: Path) -> list[Path]:
    """Builds and checks the wheel and the source distribution."""
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist)
    wheel, source = *dist.glob("*.whl"), *dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    return [wheel, source]


def attempt(distribution: Path, python: str, extras: list[str], oldest: bool) -> str:
    """Installs a distribution in a new environment and trains with it; returns the versions."""
    with tempfile.TemporaryDirectory(prefix="anycell-try-") as name:
        folder = Path(name)
        own = folder / "venv" / "bin" / "python"
        run(python, "-m", "venv", folder / "venv")
        bounds = ["-c", str(constraints(folder))] if oldest else []
        what = str(distribution.resolve()) + (f"[{','.join(extras)}]" if extras else "")
        run(own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *bounds, what)
        version = re.split("-", distribution.name.removesuffix(".tar.gz"))[1]
        cache = {"ANYCELL_CACHE_DIR": str(folder / "kernels")}
        said = run(own, "-m", "anycell", "doctor", cwd=folder, **cache)
        if f"anycell {version}, in {folder}" not in said:
            sys.exit(f"expected version {version} in {folder}\n{said}")
        for extra in ["", *extras]:
            if page := PAGES.get(extra):
                script = folder / "page.py"
                text = (ROOT / "docs" / "start" / f"{page}.md").read_text(encoding="utf-8")
                blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
                script.write_text("\n".join(blocks), encoding="utf-8")
                run(own, script, cwd=folder, KERAS_BACKEND="tensorflow", **cache)
        told = re.findall(r"^ +(numpy .*)$|^ *frameworks +(.*)$", said, re.MULTILINE)
        return "; ".join(first or second for first, second in told)


def constraints(folder: Path) -> Path:
    """Writes the oldest supported versions to a file of constraints for pip."""
    path = folder / "oldest.txt"
    shutil.copy(ROOT / "requirements" / "oldest.txt", path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--try", dest="pythons", nargs="+", default=[], metavar="PYTHON")
    add("--extra", action="append", default=[], choices=[name for name in PAGES if name])
    add("--oldest", action="store_true", help="the oldest versions that are supported")
    add("--release", action="store_true", help="refuse a version that is not a tag's")
    add("--dist", type=Path, default=ROOT / "dist", metavar="DIR")
    options = parser.parse_args()
    built = build(options.dist)
    print("built and checked:", *(path.name for path in built), flush=True)
    if options.release and not re.fullmatch(r"anycell-[\d.]+\.tar\.gz", built[1].name):
        sys.exit("this is not the revision of a tag, or a file was changed")
    for python in options.pythons:
        for distribution in built:
            versions = attempt(distribution, python, options.extra, options.oldest)
            name = f"{Path(python).name} {distribution.name}"
            print(f"{name}: installs and trains; {versions}", flush=True)


if __name__ == "__main__":
    main()
