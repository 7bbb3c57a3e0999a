"""Kill test: kills a training run at random times until it is complete, and compares it with an
undisturbed run.

    python tools/chaos/kills.py --signal SIGKILL --processes 2 --count 20 --seed 0
    python tools/chaos/kills.py --url file:///tmp/store/run

Every attempt is the same command. One random process of it gets the signal at a random time within
an undisturbed attempt's duration: during imports, compilation, training, a save or the end; or, in
every second attempt, within its duration after the first step. Faults: an attempt that cannot
continue from earlier ones; the loss of a reported checkpoint; an undocumented exit status; a
process that is alive long after the others; a last state that differs in any bit from that of the
undisturbed run. The last line is JSON, with the run's phase at each signal, as printed after
SIGTERM.

With the URL of a remote run directory (--url s3://bucket/run), which must not exist, each
attempt is on another machine, without a local tier, and a checkpoint counts as reported when it is
uploaded.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import fsspec

SETTINGS = (
    "--config.model.num_layers=1",
    "--config.data.seq_len=32",
    "--config.run.checkpoint_every=20",
    "--config.run.eval_every=50",
)
BEGUN = "first step done"
PHASE = re.compile(r"SIGTERM(?: to process [^\n]*?)? while ([^\n:]+?)(?: \(step \d+\))?:")
DOCUMENTED = {0, 143, -signal.SIGTERM, -signal.SIGKILL}
"""Exit statuses after SIGTERM; the last two are of a process without signal handlers yet."""


class Faults(list[str]):
    """The faults of a run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if the run has faults."""
    parser = argparse.ArgumentParser(description="Kills a training run at random instants.")
    parser.add_argument("--signal", choices=("SIGTERM", "SIGKILL"), default="SIGKILL")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--count", type=int, default=10, help="signals to send")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default="", help="URL of the run, in place of a folder")
    options = parser.parse_args(argv)
    if options.processes < 1:
        parser.error(f"--processes = {options.processes}; at least 1")
    if options.url:
        fs, path = fsspec.core.url_to_fs(options.url)
        if fs.exists(path):  # a complete run is removed and started again
            parser.error(f"--url {options.url} exists; give one that does not")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    os.environ["JAXSCALE_CACHE"] = str(folder / "compiled")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        found = campaign(folder, options)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({**vars(options), **found}))
    return int(bool(found["faults"]))


def campaign(folder: pathlib.Path, options: argparse.Namespace) -> dict:
    """An undisturbed run, one under signals, and whether their last states are equal."""
    alone = folder / "alone"
    run(alone, options.processes, options.steps)  # fills the cache of compiled programs
    shutil.rmtree(alone)
    typical = run(alone, options.processes, options.steps)
    disturbed = options.url or str(folder / "disturbed")
    found = disturb(disturbed, folder, options, typical)
    found["equal"] = state(str(alone), options.steps) == state(disturbed, options.steps)
    if not found["equal"]:
        found["faults"].append("the last state is not that of the undisturbed run")
    return {"attempt_seconds": round(typical[0], 1), **found}


def disturb(
    workdir: str, folder: pathlib.Path, options: argparse.Namespace, typical: Sequence[float]
) -> dict:
    """Attempts until the run is complete and `count` signals were sent; their outcome.

    Args:
      workdir: a folder or a URL.
      folder: for local tiers.
      typical: seconds of an attempt, in all and after its first step.
    """
    saves = r"checkpoint (\d+)" + (r",.* uploaded " if options.url else " saved")
    draw, sent, attempts, faults = random.Random(options.seed), 0, 0, Faults()
    statuses: dict[str, int] = {}
    during: dict[str, int] = {}
    slowest, reported = 0.0, 0
    while True:
        attempts += 1
        os.environ["JAXSCALE_LOCAL_TIER"] = str(folder / f"machine{attempts}")
        processes = start(workdir, options.processes, options.steps)
        sending = sent < options.count
        hit = False
        if sending:
            if attempts % 2 == 0:
                await_line(processes, BEGUN)
            time.sleep(draw.uniform(0, typical[1 - attempts % 2]))
            victim = draw.choice(processes)
            if hit := victim.poll() is None:
                victim.send_signal(signal.Signals[options.signal])
                sent += 1
        at = time.monotonic()
        texts = [output(each, faults) for each in processes]
        slowest = max(slowest, time.monotonic() - at) if sending else slowest
        codes = tuple(each.returncode for each in processes)
        statuses[str(codes)] = statuses.get(str(codes), 0) + 1
        text = "\n".join(texts)
        if hit:
            said = PHASE.search(text)
            phase = said[1] if said else "unknown" if BEGUN in text else "not listening yet"
            during[phase] = during.get(phase, 0) + 1
        print(f"attempt {attempts}: statuses {codes}, {sent} signals sent", flush=True)
        resumed = re.search(r"resuming at step (\d+)", text)
        if resumed and int(resumed[1]) < reported:
            faults.append(f"resumed at step {resumed[1]}, and checkpoint {reported} was reported")
        saved = re.findall(saves, text)
        reported = max([reported, *map(int, saved)])
        if "Traceback" in text:
            faults.append(f"a traceback: {text[-2000:]}")
        # If a process ended before it connected, the others wait for it.
        absent = re.search("did not connect|found no process 0", text) and min(codes) < 0
        fine = DOCUMENTED | ({1} if absent else set())
        if options.signal == "SIGTERM" and not set(codes) <= fine:
            faults.append(f"statuses {codes}: {text[-2000:]}")
        if any(code in (1, 2) for code in codes) and -signal.SIGKILL not in codes and not absent:
            faults.append(f"an attempt could not continue, statuses {codes}: {text[-2000:]}")
        if set(codes) == {0} or attempts > 3 * options.count + 10:
            if sent >= options.count or attempts > 3 * options.count + 10:
                break
            fs, path = fsspec.core.url_to_fs(workdir)
            fs.rm(path, recursive=True)  # complete before all signals were sent: again
            reported = 0
    return {
        "sent": sent,
        "attempts": attempts,
        "statuses": statuses,
        "during": during,
        "slowest_end_seconds": round(slowest, 1),
        "faults": list(faults),
    }


def run(workdir: pathlib.Path | str, count: int, steps: int) -> tuple[float, float]:
    """An undisturbed run; its seconds, in all and after the first step."""
    begin = time.monotonic()
    processes = start(workdir, count, steps)
    await_line(processes, BEGUN)
    begun = time.monotonic()
    faults = Faults()
    texts = [output(process, faults) for process in processes]
    if faults or any(process.returncode for process in processes):
        raise SystemExit("\n".join([*faults, *texts]))
    return time.monotonic() - begin, time.monotonic() - begun


class Attempt(subprocess.Popen):
    """A process whose output goes to a file, which can be read while it runs."""

    def __init__(self, command: Sequence[str]) -> None:
        self.printed = tempfile.NamedTemporaryFile("w+b")  # noqa: SIM115 - closed with the process
        super().__init__(command, stdout=self.printed, stderr=subprocess.STDOUT)

    def text(self) -> str:
        """The output so far."""
        return pathlib.Path(self.printed.name).read_text(errors="replace")


def start(workdir: pathlib.Path | str, count: int, steps: int) -> list[Attempt]:
    """The processes of one attempt."""
    command = [sys.executable, "-u", "-m", "jaxscale.train", "--config", "tiny"]
    command += [*SETTINGS, f"--config.run.steps={steps}", "--workdir", str(workdir)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [
        [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={i}"]
        for i in range(count)
    ]
    return [Attempt([*command, *(each if count > 1 else [])]) for each in flags]


def await_line(processes: Sequence[Attempt], words: str) -> None:
    """Waits until one of the processes has printed these words, or has ended."""
    while all(each.poll() is None and words not in each.text() for each in processes):
        time.sleep(0.02)


def output(process: Attempt, faults: Faults) -> str:
    """Waits for a process and returns its output; kills it after a timeout."""
    try:
        process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        faults.append("a process did not end")
        process.kill()
        process.wait()
    text = process.text()
    process.printed.close()
    return text


def state(workdir: str, step: int) -> dict[str, int]:
    """The checksum of every array of the last checkpoint."""
    fs, path = fsspec.core.url_to_fs(f"{workdir}/checkpoints/{step}/description/metadata")
    arrays = json.loads(fs.cat_file(path))["arrays"]
    return {name: array["checksum"] for name, array in arrays.items()}


if __name__ == "__main__":
    sys.exit(main())
