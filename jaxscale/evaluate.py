"""python -m jaxscale.evaluate --workdir DIR [--config.section.key=value ...]

Evaluates a run's newest checkpoint on all of its held-out text.
"""

import argparse
import json
import logging
import pathlib
import sys
from collections.abc import Sequence

from jaxscale import command_line, run_folder
from jaxscale import config as configs
from jaxscale.distributed import launcher, processes

log = logging.getLogger("jaxscale")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.evaluate",
        description="Loss, perplexity and bits per byte of a run's newest checkpoint on text that "
        "it was not trained on.",
    )
    run_folder.add_workdir_flags(parser)
    parser.add_argument(
        "--max_batches",
        metavar="N",
        type=command_line.whole(1, 2**40),
        help="stop after this many; all held-out text by default",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, help="write the numbers there too"
    )
    launcher.add_process_flags(parser)
    options, overrides = command_line.parse(parser, sys.argv[1:] if argv is None else argv)
    with command_line.refusals():
        config = run_folder.load_config(options.workdir, overrides)
        if not config.data.heldout:
            raise ValueError(
                "data.heldout = 0: this run held out no text, so there is none to evaluate on; "
                "train with data.heldout above 0"
            )
        place = launcher.find_processes(options)
    command_line.log_to_stdout()
    settings = {"config": configs.to_dict(config), "flags": launcher.common_flags(options)}
    with processes.together(place, settings):
        return _evaluate(options, config, overrides)


def _evaluate(options: argparse.Namespace, config: configs.Config, overrides: list[str]) -> int:
    # JAX is imported only now, so that a typo is refused at once.
    import jax  # noqa: PLC0415

    from jaxscale.run import setup  # noqa: PLC0415

    with command_line.refusals():
        config = run_folder.fit_devices(config, jax.device_count(), overrides)
        config, engine = setup.open_engine(config)
        step, params, metadata = setup.restore_params(engine, options.workdir)
        text = processes.first("text", lambda: setup.open_text(config, options.workdir))
    assert text.heldout is not None, "refused above"
    if metadata["data"]["fingerprint"] != text.train.fingerprint:
        log.info(
            "note: the text or its settings differ from those of training: these numbers are not "
            "comparable with the run's own, and the model may have been trained on the text"
        )
    evaluation = setup.evaluate_loss(
        engine, params, text.heldout, config.data.global_batch_size, options.max_batches
    )
    result = {
        "step": step,
        **evaluation.metrics,
        "eval_bytes": round(evaluation.num_bytes),
    }
    part = "the held-out text" if options.max_batches is None else "part of the held-out text"
    log.info(f"step {step} of {options.workdir} on {part}:\n{_table(result)}")
    if options.json and jax.process_index() == 0:
        with command_line.refusals():
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _table(result: dict[str, float]) -> str:
    return f"""\
  loss           {result["eval_loss"]:.4f} nats per token
  perplexity     {result["eval_perplexity"]:.4g}
  bits per byte  {result["eval_bits_per_byte"]:.4f}
  tokens         {result["eval_tokens"]:,}
  bytes          {result["eval_bytes"]:,}"""


if __name__ == "__main__":
    sys.exit(main())
