"""Packs what a GPU machine needs to run every test and bench without Rust or a network.

    python tests/gpu_bundle/pack.py build/gpu-bundle build/gpu-bundle.tar.xz

The folder already holds the wheel; the Rust test and bench programs, the Python tests, the benches, the demo
and run.sh are added. Unpack the tar there and run ``./gpu-bundle/run.sh``.
"""

from __future__ import annotations

import json
import lzma
import pathlib
import shutil
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_BYTES = 64 << 20
# xz, quick, with a dictionary that holds the kernels which every Rust program has a copy of.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 128 << 20}]
# These check the sources, with libclang and g++, not the GPU.
NOT_THERE = {"bindings", "device_planner"}


def rust_programs(command: str) -> list[tuple[str, pathlib.Path]]:
    """Builds the programs of ``cargo test`` or ``cargo bench`` and gives their names and paths."""
    cargo = [
        "cargo",
        command,
        "--no-run",
        "--message-format=json",
        "--workspace",
        "--exclude=ferromla-python",
        "--features=ferromla/cudarc-safe",
    ]
    # One profile, so that the crate is compiled once for both.
    cargo += ["--release"] if command == "test" else ["--profile=release"]
    output = subprocess.run(cargo, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    wanted = "bench" if command == "bench" else None
    found = []
    for message in messages:
        if message.get("reason") != "compiler-artifact" or not message.get("executable"):
            continue
        kind, name = message["target"]["kind"], message["target"]["name"]
        if name in NOT_THERE or not message["profile"]["test"] or (wanted and wanted not in kind):
            continue
        if command == "test" and "bench" in kind:
            continue
        package = message["package_id"].rpartition("#")[2].rpartition("/")[2].partition("@")[0]
        found.append((f"{package}-{kind[0]}-{name}", pathlib.Path(message["executable"])))
    return found


def main(folder: pathlib.Path, archive: pathlib.Path) -> None:
    """Fills ``folder`` and packs it."""
    for command in ("test", "bench"):
        programs = folder / f"rust-{command}"
        programs.mkdir(parents=True, exist_ok=True)
        for name, path in rust_programs(command):
            shutil.copy2(path, programs / name)
            subprocess.run(["strip", programs / name], check=True)
    for source in ("tests/python", "benches", "docs", "examples", "pyproject.toml", "README.md"):
        target = folder / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.rs")
            shutil.copytree(ROOT / source, target, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy2(ROOT / source, target)
    shutil.copy2(ROOT / "tests/gpu_bundle/run.sh", folder / "run.sh")
    with lzma.open(archive, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        tar.add(folder, arcname="gpu-bundle")
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB")
    if size > LIMIT_BYTES:
        raise SystemExit(f"the bundle is larger than {LIMIT_BYTES >> 20} MiB")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
