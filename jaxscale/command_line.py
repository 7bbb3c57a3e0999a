"""Command-line parsing for every command: no unknown flag, and errors of one line.

Nothing here imports JAX: a mistyped flag must be refused in a fraction of a second.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import os
import pathlib
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from jaxscale.choices import nearest, nearest_settings, settings_called
from jaxscale.storage import durable

MOST_CPU_DEVICES = 4096
MOST_CHARACTERS = 10_000  # of an error message

STDOUT = "stdout"
"""The name of that stream in errors."""

type Report = Callable[[str, int], tuple[str, int]]
"""Error message and status -> the text to print, and the status to end with."""

OTHER_FLAGS = {
    "resume": "--workdir DIR, with which the same command resumes",
    "output_dir": "--workdir DIR",
    "wandb": "--trackers wandb",
}
"""What other trainers call a flag -> ours, where a command has it."""


def _unchanged(message: str, status: int) -> tuple[str, int]:
    """The report of a process that is alone."""
    return message, status


_report: Report = _unchanged


def run(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Runs a command on the arguments of this process, and ends it with the command's status.

    Ctrl-C, and a reader that has seen enough (`| head`), end it without a traceback. A command
    that failed does not wait for threads, which may never end: all that it had to wait for, it has
    waited for in `main`.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _report_unraisable
    _open_streams()
    try:
        _check_environment()
        status = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _end(128 + signal.SIGINT)
    except BrokenPipeError:
        silence(sys.stdout)
        status = 128 + signal.SIGPIPE
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except Exception as error:
        if isinstance(error, OSError) and error.filename == STDOUT:
            print(f"error: {_sentence(error)}", file=sys.stderr)
        else:
            traceback.print_exc()
        status = 1
    if status in (1, 2):
        _end(status)
    sys.exit(status)


def _open_streams() -> None:
    """Has standard streams that can be used. Where one is closed, the next file that is opened
    would get its number, and with it what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(nowhere, True)
            stream = open(nowhere, mode, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    sys.stdout = _rewrapped(_Stdout, sys.stdout)
    sys.stderr = _rewrapped(_Stderr, sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale without what a model writes


def _rewrapped(kind: type[io.TextIOWrapper], stream: TextIO) -> TextIO:
    if type(stream) is not io.TextIOWrapper:  # as of a test or a notebook
        return stream
    buffered, through = stream.line_buffering, stream.write_through
    return kind(
        stream.buffer, stream.encoding, stream.errors, None, buffered, write_through=through
    )


class _Stdout(io.TextIOWrapper):
    """Its errors say whose they are: what a command prints may be what it was asked for."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            error.filename = STDOUT
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            error.filename = STDOUT
            raise


class _Stderr(io.TextIOWrapper):
    """Drops what nobody can read, as of a closed terminal or a full disk: a command ends with the
    status that it has, by which a supervisor decides."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            silence(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            silence(self)


def _check_environment() -> None:
    """Refuses what JAX would refuse with a traceback, when it is imported."""
    count = os.environ.get("JAX_NUM_CPU_DEVICES")
    if count and not (count.isdecimal() and 1 <= int(count) <= MOST_CPU_DEVICES):
        refuse(
            f"JAX_NUM_CPU_DEVICES = {count!r} in the environment is not a whole number from 1 to "
            f"{MOST_CPU_DEVICES}"
        )


def _interrupt(number: int, frame: Any) -> NoReturn:
    """The first Ctrl-C lets the command tidy up; the second one does not wait for that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _report_unraisable(error: Any) -> None:
    """As Python does; but after a save that failed, and was reported, arrays that are still being
    written find their event loop closed, each with a traceback."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


def _end(status: int) -> NoReturn:
    """Ends without waiting for threads, such as those of a compiler."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def silence(stream: TextIO) -> None:
    """Drops what is written to a stream from now on: nobody can read it any more."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def refuse(message: str, status: int = 2) -> NoReturn:
    """Prints one line, with indented lines of details below it, and ends the process."""
    text, status = _report(message, status)
    print(f"error: {escaped(text)}", file=sys.stderr)
    raise SystemExit(status)


def escaped(text: str) -> str:
    """A message that can be read, whatever it quotes of a file: control characters, which may be
    orders to a terminal, are escaped, and the middle of a long one is left out. Line breaks stay
    before a line of details, which begins with two spaces.

    >>> print(escaped("a\\nb\\x1b[2J:\\n  c"))
    a\\nb\\x1b[2J:
      c
    """
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    lines = re.split(r"\n(?=  )", text)
    return "\n".join(
        "".join(one if one.isprintable() else repr(one)[1:-1] for one in line) for line in lines
    )


class _Lines(logging.StreamHandler):
    """Prints log lines, as long as anybody can read them: a closed terminal or pipe, or a full disk
    behind stdout, is no reason to lose a run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of the library
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        silence(self.stream)
        with contextlib.suppress(OSError):
            print(f"warning: no more lines to stdout ({error.strerror})", file=sys.stderr)


def log_to_stdout() -> None:
    """Prints the log lines of this package, unformatted, apart from those of other libraries."""
    logger = logging.getLogger("jaxscale")
    logger.handlers = [_Lines(sys.stdout)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def set_process_log(process_id: int, report: Report) -> None:
    """Sets up the log of one process of several: only process 0 logs what is the same in all.

    Args:
      report: tells the other processes an error.
    """
    global _report
    _report = report
    if process_id:
        logger = logging.getLogger("jaxscale")
        logger.setLevel(logging.WARNING)
        for handler in logger.handlers:
            handler.setFormatter(logging.Formatter(f"[process {process_id}] %(message)s"))


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns errors that the user can fix into one line: in loading and checks, not in training.

    The status is 2; or 1, for errors that may pass by themselves; or the error's own `exit_status`.
    """
    try:
        yield
    except BrokenPipeError:  # of stdout: no error of the user's
        raise
    except (ValueError, OSError) as error:
        passing = isinstance(error, OSError) and error.errno in durable.MAY_PASS
        refuse(_sentence(error) + _place(error), getattr(error, "exit_status", 1 if passing else 2))


def _sentence(error: Exception) -> str:
    """What an error says: of the operating system's, the file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _place(error: Exception) -> str:
    """Where code from outside the package, such as a model of one's own, was when an error came up:
    such an error may not say what it is about."""
    ours = [pathlib.Path(__file__).parent, *map(pathlib.Path, sysconfig.get_paths().values())]
    # The first two are `refusals` and what it surrounds.
    for frame in reversed(traceback.extract_tb(error.__traceback__)[2:]):
        file = pathlib.Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in ours):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def whole(least: int, most: int) -> Callable[[str], int]:
    """The `type` of a flag that takes whole numbers from `least` to `most`.

    Both bounds are checked before anything is read or imported: no command loops over a mistyped
    number, or fails on it after minutes of work.
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most}")
        return number

    return read


def real(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """The `type` of a flag that takes numbers from `least` (excluded with `above`) to `most`."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number")
        if not (least < number if above else least <= number) or number > most:
            start = f"above {least:g}, at most" if above else f"from {least:g} to"
            raise argparse.ArgumentTypeError(f"{text} is not {start} {most:g}")
        return number

    return read


def output_file(text: str) -> pathlib.Path:
    """The `type` of a flag that names a file to write: whether that can be done is known at once,
    and not only after hours of work."""
    path = pathlib.Path(text)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    if is_folder:
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def write_json(file: pathlib.Path | None, result: Any) -> None:
    """Writes the result of a command to its --json, where that is given."""
    if file:
        with refusals():
            file.write_text(json.dumps(result, indent=2) + "\n")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], settings: Collection[str] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """Reads the flags of a command; flags are never abbreviated.

    Args:
      parser: when it has --config, `--config.section.key=value` (or a space for the `=`) is taken
        as an override.
      argv: without the name of the program.
      settings: every "section.key" of a configuration, to suggest in place of an unknown flag.

    Returns:
      The flags, and the overrides as "section.key=value" in their order, for `config.load`.

    Raises:
      SystemExit: with status 2 and one line, for anything that the parser does not know.
    """
    known = [flag for action in parser._actions for flag in action.option_strings]
    overrides, rest = [], []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if "--config" in known and flag.startswith("--config."):
            if not equals:
                value = next(words, "--")
                if value.startswith("--"):
                    refuse(f"{flag} needs a value: {flag}=VALUE")
            overrides.append(f"{flag.removeprefix('--config.')}={value}")
        elif "--" in (flag, value):  # argparse would give the flag an empty list
            refuse("unexpected '--'; every value follows its flag")
        elif flag.startswith("--") and flag not in known:
            refuse(_unknown(word, known, settings))
        else:
            rest.append(word)
    parser.allow_abbrev = False
    parser.error = refuse
    namespace, unknown = parser.parse_known_args(rest)
    if unknown:
        refuse(_unknown(unknown[0], known, settings))
    return namespace, overrides


def _unknown(word: str, known: Collection[str], settings: Collection[str]) -> str:
    flag, equals, value = word.partition("=")
    if not word.startswith("-"):
        if "--config" in known and equals and "." in flag:
            return f"unexpected {word!r}; write --config.{word}"
        return f"unexpected {word!r}; every value follows its flag"
    near = _meant(flag, known, settings)
    near = [one + equals + value if one.startswith("--config.") else one for one in near]
    return f"unknown flag {flag}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _meant(flag: str, known: Collection[str], settings: Collection[str]) -> list[str]:
    """The flags, or settings as flags, that an unknown flag may mean."""
    name = flag.lstrip("-")
    head, dot, tail = name.partition(".")
    if dot and "--config" in known:
        name = tail if nearest(head, ["config"]) else name
        return [f"--config.{one}" for one in nearest_settings(name, settings) or [name]]
    other = OTHER_FLAGS.get(name, "")
    if other.partition(" ")[0] in known:
        return [other]
    flags = {one.lstrip("-"): one for one in known}
    if near := settings_called(name, settings):
        return [f"--config.{one}" for one in near]
    if near := nearest(name, flags):
        return [flags[near[0]]]
    return [f"--config.{one}" for one in nearest_settings(name, settings)]
