"""Compile the fake accelerator: once for a torch, a Python and these sources, with nothing but a C++ compiler.

    csrc/*.cpp --two at a time--> objects --> build/fakeacc/<hash>/_C.so

`build/` is git's to ignore. A file lock lets one of several processes build; what is built for other hashes is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCES = Path(__file__).parent / "fakeacc" / "csrc"
CACHE = Path(__file__).parents[2] / "build" / "fakeacc"
FOLDER_VARIABLE = "FAKEACC_BUILD"
LIBRARY = "_C.so"
COMPILE_TIMEOUT_S = 600


class BuildError(Exception):
    """Nothing can be built here; the text says why."""


def build() -> Path:
    """The folder with the compiled library; it is made if it is not there.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++, clang++, or the variable CXX)")
    folder = CACHE / _hash(compiler)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / LIBRARY).exists():
            for old in CACHE.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _compile(compiler, Path(scratch))
                folder.mkdir()
                os.replace(Path(scratch, LIBRARY), folder / LIBRARY)
    return folder


def _hash(compiler: str) -> str:
    what = hashlib.sha256(repr((torch.__version__, sys.version, compiler, _flags())).encode())
    for path in sorted(SOURCES.iterdir()):
        what.update(path.name.encode() + path.read_bytes())
    return what.hexdigest()[:16]


def _flags() -> list[str]:
    abi = int(torch.compiled_with_cxx11_abi())
    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    options = ["-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    return [*options, "-DTORCH_EXTENSION_NAME=_C", *(f"-isystem{folder}" for folder in folders)]


def _compile(compiler: str, scratch: Path) -> None:
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    objects = [scratch / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(_run, [compiler, *_flags(), "-c", str(source), "-o", str(target)])
            for source, target in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    libraries = [f"-L{folder}" for folder in library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    _run([compiler, "-shared", *map(str, objects), *libraries, "-o", str(scratch / LIBRARY)])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
        raise BuildError(f"{command[0]} failed: {first}")


if __name__ == "__main__":
    print(build())
