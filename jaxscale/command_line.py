"""Command-line parsing: flags, overrides, signals, and errors of one line.

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
MOST_CHARACTERS = 10_000
"""The longest error message that is printed whole."""

STDOUT = "stdout"
"""The file name of standard output in errors."""

type Report = Callable[[str, int], tuple[str, int]]
"""Error message and exit status -> the text to print and the status to exit with."""

OTHER_FLAGS = {
    "resume": "--workdir DIR, with which the same command resumes",
    "output_dir": "--workdir DIR",
    "wandb": "--trackers wandb",
}
"""A flag of other trainers -> ours, where a command has it."""


def _unchanged(message: str, status: int) -> tuple[str, int]:
    """The report of a single process."""
    return message, status


_report: Report = _unchanged


def run(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Runs a command on the arguments of this process, and exits with the command's status.

    Ctrl-C and a closed pipe (`| head`) end it without a traceback. A failed command does not join
    its threads, which may never end: `main` has already waited for everything it needs.
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
    """Replaces closed standard streams. The next file opened would otherwise get the descriptor of
    a closed stream, and with it everything that libraries print."""
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
        # A locale's encoding may lack characters that a model writes.
        sys.stdout.reconfigure(errors="backslashreplace")


def _rewrapped(wrapper: type[io.TextIOWrapper], stream: TextIO) -> TextIO:
    if type(stream) is not io.TextIOWrapper:  # in a test or a notebook
        return stream
    buffered, through = stream.line_buffering, stream.write_through
    return wrapper(
        stream.buffer, stream.encoding, stream.errors, None, buffered, write_through=through
    )


class _Stdout(io.TextIOWrapper):
    """Standard output, named in its errors: a command fails if its output cannot be written."""

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
    """Standard error that drops text it cannot write (closed terminal, full disk): the command
    still ends with its own status, by which a supervisor decides."""

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
    """Refuses environment variables for which importing JAX would raise a traceback."""
    count = os.environ.get("JAX_NUM_CPU_DEVICES")
    if count and not (count.isdecimal() and 1 <= int(count) <= MOST_CPU_DEVICES):
        refuse(
            f"JAX_NUM_CPU_DEVICES = {count!r} in the environment is not a whole number from 1 to "
            f"{MOST_CPU_DEVICES}"
        )


def _interrupt(number: int, frame: Any) -> NoReturn:
    """Raises KeyboardInterrupt at the first Ctrl-C, for clean-up; the second one kills."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _report_unraisable(error: Any) -> None:
    """Python's hook, without "Event loop is closed": after a failed save, already reported, each
    array still being written by Orbax would print that traceback."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


def _end(status: int) -> NoReturn:
    """Exits without joining threads, such as a compiler's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def silence(stream: TextIO) -> None:
    """Redirects a stream without readers to /dev/null."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def refuse(message: str, status: int = 2) -> NoReturn:
    """Prints an error of one line, with indented lines of details below it, and exits."""
    text, status = _report(message, status)
    print(f"error: {escaped(text)}", file=sys.stderr)
    raise SystemExit(status)


def escaped(text: str) -> str:
    """A message with control characters escaped, which a terminal would obey, and the middle of a
    long message left out. Line breaks before a line of details (two spaces) are kept.

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
    """Handler that prints log lines while stdout can be written: a closed terminal or pipe, or a
    full disk, must not end a run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of the library
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        silence(self.stream)
        with contextlib.suppress(OSError):
            print(f"warning: stdout cannot be written ({error.strerror})", file=sys.stderr)


def log_to_stdout() -> None:
    """Prints this package's log lines to stdout, unformatted, separate from other libraries'."""
    logger = logging.getLogger("jaxscale")
    logger.handlers = [_Lines(sys.stdout)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def set_process_log(process_id: int, report: Report) -> None:
    """Sets up the log of one process of several: information is logged by process 0 only.

    Args:
      report: sends an error to the other processes.
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
    """Prints errors that the user can fix as one line: in loading and checks, not in training.

    The status is 2; 1 for errors that may be transient; or the error's `exit_status`.
    """
    try:
        yield
    except BrokenPipeError:  # of stdout: not the user's error
        raise
    except (ValueError, OSError) as error:
        transient = isinstance(error, OSError) and error.errno in durable.MAY_PASS
        status = getattr(error, "exit_status", 1 if transient else 2)
        refuse(_sentence(error) + _foreign_line(error), status)


def _sentence(error: Exception) -> str:
    """The text of an error; for one of the operating system, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _foreign_line(error: Exception) -> str:
    """The file and line of code from outside the package, such as a custom model, that an error was
    raised in: its text may lack the context."""
    ours = [pathlib.Path(__file__).parent, *map(pathlib.Path, sysconfig.get_paths().values())]
    # The first two are `refusals` and what it surrounds.
    for frame in reversed(traceback.extract_tb(error.__traceback__)[2:]):
        file = pathlib.Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in ours):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def whole(least: int, most: int) -> Callable[[str], int]:
    """The `type` of a flag that takes whole numbers from `least` to `most`.

    Bounds are checked before anything is read or imported: a mistyped number must not fail after
    minutes of work.
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
    """The `type` of a flag that names a file to write, checked at once and not after hours of
    work."""
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
    """Writes the result of a command to the file of --json, if given."""
    if file:
        with refusals():
            file.write_text(json.dumps(result, indent=2) + "\n")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], settings: Collection[str] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """Reads the flags of a command; flags are never abbreviated.

    Args:
      parser: with a flag --config, `--config.section.key=value` (or a space for the `=`) is an
        override.
      argv: the arguments without the program's name.
      settings: every "section.key" of a configuration, suggested for an unknown flag.

    Returns:
      The flags, and the overrides as "section.key=value" in their order, for `config.load`.

    Raises:
      SystemExit: with status 2 and one line, for an unknown flag or value.
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
