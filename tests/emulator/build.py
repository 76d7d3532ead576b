"""Builds the emulated GPU: a libcuda.so of one device that runs the kernels of kernels/ on the host.

    python tests/emulator/build.py build/emulator [--only PATTERN]

Programs that find it before the real one (``LD_LIBRARY_PATH=build/emulator``) use it as their driver. Its parts:

    driver/    the driver's functions: memory, streams, graphs, launches
    machine/   threads, barriers, shared memory, asynchronous copies, matrix products
    language/  the words of CUDA C++ that the kernels use
    ptx/       kernels/ptx/, over the machine: all other sources of the kernels are compiled as they are

Kernels are compiled by g++ (``CXX``), each by itself, when something they are made of has changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
# The name of a kernel, or the first one of FM_DECODE_KERNELS, where it is defined.
KERNEL = re.compile(r"FM_DECODE_KERNEL(S?)(?:_STEPS)?\((fm_\w+),|\b(fm_\w+)\(const __grid_constant__")
CLUSTERS = ["", "_by_2", "_by_4", "_by_8", "_by_16"]  # what their names end with
COMPILER = [os.environ.get("CXX", "g++"), "-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE"]
# The kernels' own warnings are nvcc's business.
KERNEL_FLAGS = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-psabi"]
OWN_FLAGS = ["-O2", "-Wall", "-Wextra", "-Werror"]


def cuda_include() -> pathlib.Path:
    """The folder of cuda.h: the pip toolkit's."""
    return pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/include"


def copy_sources(to: pathlib.Path) -> None:
    """The kernels with the emulation's ``ptx/``."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(KERNELS, to, ignore=shutil.ignore_patterns("ptx"))
    shutil.copytree(HERE / "ptx", to / "ptx")
    shutil.copy(KERNELS / "ptx/launch.cuh", to / "ptx")


def kernel_units(sources: pathlib.Path, units: pathlib.Path, only: str) -> list[pathlib.Path]:
    """A translation unit for each kernel."""
    found = []
    for source in sorted(sources.glob("*.cu")):
        for match in KERNEL.finditer(source.read_text()):
            names = [f"{match[2] or match[3]}{end}" for end in (CLUSTERS if match[1] else CLUSTERS[:1])]
            for name in filter(re.compile(only).search, names):
                unit = units / f"{name}.cpp"
                unit.write_text(f'#include "language/kernel.h"\n#include "{source.name}"\nEMULATED_KERNEL({name})\n')
                found.append(unit)
    return found


def digest(*folders: pathlib.Path) -> str:
    """Of all files in the folders."""
    state = hashlib.sha256(" ".join(COMPILER + KERNEL_FLAGS).encode())
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.is_file():
            state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()


def compile_unit(unit: pathlib.Path, target: pathlib.Path, flags: list[str], includes: list[pathlib.Path]) -> None:
    """To an object file."""
    command = [*COMPILER, *flags, "-c", str(unit), "-o", str(target), *(f"-I{folder}" for folder in includes)]
    subprocess.run(command, check=True)


def build(folder: pathlib.Path, only: str) -> None:
    """Builds what is not up to date."""
    sources, objects, stamp = folder / "kernels", folder / "objects", folder / "digest"
    objects.mkdir(parents=True, exist_ok=True)
    copy_sources(sources)
    state = digest(sources, HERE / "language", HERE / "machine")
    fresh = stamp.exists() and stamp.read_text() == state
    stamp.unlink(missing_ok=True)
    jobs = []
    for part in ("driver", "machine", "language"):
        for unit in sorted((HERE / part).glob("*.cpp")):
            jobs.append((unit, objects / f"{part}_{unit.stem}.o", OWN_FLAGS, [HERE, HERE / part, cuda_include()]))
    for unit in kernel_units(sources, objects, only):
        target = unit.with_suffix(".o")
        if not fresh or not target.exists():
            jobs.append((unit, target, KERNEL_FLAGS, [HERE, HERE / "language", sources]))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(compile_unit, *job) for job in jobs]:
            done.result()
    library = folder / "libcuda.so"
    parts = [str(path) for path in sorted(objects.glob("*.o"))]
    subprocess.run([*COMPILER, "-shared", "-Wl,-soname,libcuda.so", "-o", str(library), *parts], check=True)
    stamp.write_text(state)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="kernels whose names this regular expression finds")
    options = parser.parse_args()
    build(options.folder, options.only)


if __name__ == "__main__":
    main()
