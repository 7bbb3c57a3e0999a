"""Config and tokenizer of a run's folder, read by commands before JAX is imported.

Nothing here imports JAX: a mistyped key must be refused in a fraction of a second.
"""

import argparse
import dataclasses
import logging
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from jaxscale import command_line
from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.config.layout import MESH_AXES, OVERLAPS, READ_WITH
from jaxscale.config.model import ModelSettings
from jaxscale.storage import durable
from jaxscale.storage.local_tier import fetch_files, fetching, local_tier
from jaxscale.storage.object_store import is_remote

log = logging.getLogger("jaxscale")

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
HF_CONFIG = "hf_config.json"
"""Copy of the config.json of the Hugging Face model that a run's weights come from."""

GENERATION = "generation_config.json"

BEST: Final = "best"
"""The --step of the checkpoint with the lowest held-out loss."""

COPIED_WITH_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    HF_CONFIG,
)
"""Files that are copied with a tokenizer, to and from the folder of a run or of shards."""


def add_workdir_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of commands that read a run's folder."""
    parser.add_argument(
        "--workdir",
        required=True,
        metavar="DIR",
        type=folder,
        help="the run's folder, or its URL, such as s3://bucket/run",
    )
    add_step_flag(parser)
    parser.add_argument(
        "--config",
        metavar=".SECTION.KEY=VALUE",
        type=refuse_file,
        help="change a setting of the run's config, such as --config.layout.fsdp=2; with a mesh "
        "axis given, the others are 1, and data takes the remaining devices",
    )
    parser.add_argument(
        "--trust_family",
        action="store_true",
        help="import the custom code, from outside the package, that the run's config names",
    )


def add_step_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of commands that read a run's parameters."""
    parser.add_argument(
        "--step",
        metavar="N",
        type=step_or_best,
        help="use the checkpoint of step N, or 'best' for the lowest held-out loss; default the "
        "newest",
    )


def step_or_best(text: str) -> int | str:
    """The type of --step.

    Raises:
      argparse.ArgumentTypeError: it is neither a step nor "best".
    """
    if text == BEST:
        return text
    try:
        return command_line.whole(0, 2**53)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {BEST}") from None


def folder(text: str) -> pathlib.Path:
    """The type of --workdir: a folder, or the local tier of a URL.

    Raises:
      argparse.ArgumentTypeError: it is empty, as from an unset variable, which would mean the
        current folder; or the URL cannot be opened.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give the run's folder, or '.' for this one")
    try:
        return folder_of(text)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def folder_of(text: str) -> pathlib.Path:
    """A folder by its path, or the local tier of a URL.

    Raises:
      ValueError: the URL cannot be opened, or lacks a slash.
    """
    if re.match(r"\w{2,}:/(?!/)", text):
        raise ValueError(f"{text} lacks a slash; did you mean {text.replace(':/', '://', 1)}?")
    # A shell does not expand ~ in --workdir=~/run.
    return local_tier(text) if is_remote(text) else pathlib.Path(text).expanduser()


def new_folder(text: str) -> pathlib.Path:
    """The type of --output, a folder to write.

    Raises:
      argparse.ArgumentTypeError: it is a URL.
    """
    if is_remote(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and files are written locally; give a folder and upload it, or "
            "train with --workdir URL --config.model.init_from=FOLDER"
        )
    return pathlib.Path(text)


def check_empty(output: pathlib.Path) -> None:
    """Refuses an --output with files.

    Raises:
      ValueError: it has some.
    """
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty; name a new folder")


def check_files(workdir: pathlib.Path) -> None:
    """Refuses a run's folder with a special file, on which a command could block forever.

    Raises:
      ValueError: names the file.
    """
    if found := durable.special_file(workdir):
        raise ValueError(
            f"{found} is a pipe, a socket or a device, not a file or folder of a run; move it, or "
            "give another --workdir"
        )


def default_folder(config: str) -> pathlib.Path:
    """The folder of a run with a --config and no --workdir.

    >>> default_folder("configs/tiny.py"), default_folder("runs/one/config.json")
    (PosixPath('runs/tiny'), PosixPath('runs/one'))
    """
    path = pathlib.Path(config)
    return path.parent if path.suffix == ".json" else pathlib.Path("runs") / path.stem


def load_config(
    workdir: pathlib.Path, overrides: Sequence[str] = (), *, trust_foreign: bool = False
) -> Config:
    """The config in a run's folder, with "section.key=value" overrides.

    The folder's config has the size of every mesh axis. An override of one resets the others to 1,
    and `data` to the remaining devices. These commands do not train: remat and offload, which may
    not fit the new layout, are reset to "none".

    Args:
      trust_foreign: whether to import code from outside the package that the config names.

    Raises:
      FileNotFoundError: the folder does not contain a run.
      ValueError: an unknown key, a value of the wrong type, a file that is not a config, or a
        special file (`check_files`).
    """
    path = workdir / "config.json"
    check_files(workdir)
    with fetching(workdir) as store:
        if store:
            fetch_files(store, workdir)
            if not path.is_file():
                raise FileNotFoundError(f"--workdir {store.url} has no run (no config.json)")
    if not path.is_file():
        raise FileNotFoundError(
            f"--workdir {workdir} has no run (no config.json); train one first: "
            f"python -m jaxscale.train --config FILE --workdir {workdir}"
        )
    sections = configs.read_sections(path)
    sections["layout"] = sections.get("layout", {}) | {
        "remat": "none",
        "offload": "none",
        "offload_bytes": 0,
    }
    if named := _named_axes(overrides):
        sizes = {axis: 1 for axis in (*MESH_AXES, "tensor_rows") if axis not in named}
        if "data" in sizes and "-1" not in named.values():
            sizes["data"] = -1
        read = {name for axis in sizes for name in READ_WITH.get(axis, ())}
        sections["layout"] |= sizes | dict.fromkeys(read & set(OVERLAPS), False)
    return configs.from_dict(sections, overrides, trust_foreign=trust_foreign)


def copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a folder's tokenizer and its further files; existing files of the target are kept."""
    for name in (*TOKENIZERS, *COPIED_WITH_TOKENIZER):
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def kept_tokenizer(name: str, workdir: pathlib.Path) -> pathlib.Path | None:
    """The run's copy of `data.tokenizer`, in its folder, or None.

    Raises:
      ValueError: the file at `name` is now another tokenizer.
    """
    given = pathlib.Path(name)
    kept = workdir / TOKENIZERS[given.suffix == ".model"]
    if given.suffix not in (".json", ".model") or not kept.is_file():
        return None
    if given.is_file() and given.read_bytes() != kept.read_bytes():
        raise ValueError(
            f"data.tokenizer = {name!r} is not the tokenizer of the run, which is in {kept}; "
            "restore the setting, or start a new --workdir"
        )
    return kept


def fit_devices(config: Config, num_devices: int, overrides: Sequence[str] = ()) -> Config:
    """A run's config for another number of devices than it was trained on, with a replica on each.

    Logs the change. A layout that fits, or that `overrides` set, is not changed.
    """
    layout = config.layout
    if (
        _named_axes(overrides)
        or -1 in layout.settings.values()
        or layout.num_devices == num_devices
    ):
        return config
    trained = layout.axes_text
    log.info(
        f"trained on {layout.num_devices} devices ({trained or 'every axis 1'}), and here "
        f"{'is 1' if num_devices == 1 else f'are {num_devices}'}: using layout.data = "
        f"{num_devices}; to change, set --config.layout.KEY=VALUE"
    )
    sizes: dict[str, Any] = dict.fromkeys((*MESH_AXES, "tensor_rows"), 1) | {"data": num_devices}
    alone = sizes | dict.fromkeys(OVERLAPS, False)
    return dataclasses.replace(config, layout=dataclasses.replace(layout, **alone))


def note_other_model(model: ModelSettings, workdir: pathlib.Path) -> None:
    """Logs each setting of the model that differs from the one its weights were trained with."""
    trained = configs.read_sections(workdir / "config.json").get("model", {})
    for name, value in configs.read_settings(model).items():
        if name in trained and trained[name] != value:
            log.info(f"note: model.{name} = {value!r}; the run was trained with {trained[name]!r}")


def refuse_file(text: str) -> NoReturn:
    """The type of --config for a run, whose config can only be changed by setting."""
    raise argparse.ArgumentTypeError(
        f"{text} is not read, since the run has its config; to change a setting, use "
        "--config.section.key=value"
    )


def _named_axes(overrides: Sequence[str]) -> dict[str, str]:
    """The mesh axes that overrides set -> their sizes, as text."""
    settings = {path: text for path, _, text in (o.partition("=") for o in overrides)}
    return {axis: settings[f"layout.{axis}"] for axis in MESH_AXES if f"layout.{axis}" in settings}
