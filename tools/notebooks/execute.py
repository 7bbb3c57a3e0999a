"""python tools/notebooks/execute.py [FILE...]

Runs notebooks, all by default, and writes their outputs into them. Uses eight virtual CPU devices.
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import os
import pathlib
import sys
from collections.abc import Sequence

try:
    import nbformat
    from nbclient import NotebookClient
    from PIL import Image
    from traitlets.config import Config
except ModuleNotFoundError as error:
    MISSING = error.name  # --help needs no library
else:
    MISSING = ""

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a cell fails, with its traceback on stderr."""
    parser = argparse.ArgumentParser(
        prog="python tools/notebooks/execute.py",
        description="Runs notebooks and writes their outputs into them.",
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", type=pathlib.Path, help="default all of tools/notebooks"
    )
    options = parser.parse_args(argv)
    if missing := [str(path) for path in options.files if not path.is_file()]:
        parser.error(f"{', '.join(missing)} does not exist; give notebooks of tools/notebooks")
    if MISSING:
        parser.error(f"{MISSING} is not installed; pip install 'jaxscale[dev]' includes it")
    os.environ |= environment()
    for path in options.files or sorted(HERE.glob("*.ipynb")):
        notebook = run(path)
        shrink(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)
    return 0


def environment() -> dict[str, str]:
    """The environment of a notebook's kernel, with the notebook's folder on the path, as in
    Jupyter."""
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore::DeprecationWarning",
    }


def run(
    path: pathlib.Path, timeout: float = 600, *, times: int = 1, before: str = ""
) -> nbformat.NotebookNode:
    """Runs a notebook from the repository's root and returns it with outputs.

    Args:
      times: number of runs of each cell before the next one.
      before: Python code to run first, which is not part of the result.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells = [
        copy.deepcopy(cell)
        for cell in notebook.cells
        for _ in range(times if cell.cell_type == "code" else 1)
    ]
    if before:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
    # Files instead of ports, so that other users cannot connect.
    by_files = Config({"KernelManager": {"transport": "ipc"}})
    client = NotebookClient(
        notebook,
        config=by_files,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
        record_timing=False,
    )
    client.execute()
    notebook.cells = notebook.cells[bool(before) :]
    return notebook


def shrink(notebook: nbformat.NotebookNode) -> None:
    """Reduces pictures to 128 colours: a third of the bytes, with no visible difference."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if text := output.get("data", {}).get("image/png"):
                picture = Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")
                smaller = io.BytesIO()
                picture.quantize(128, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
                output.data["image/png"] = base64.b64encode(smaller.getvalue()).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
