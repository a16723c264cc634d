"""The command line that main_rl.py, main_sl.py and main_eval.py share: arguments, help, and how a command ends.

Exit codes: 0 done, 1 the run failed (its log holds the traceback), 2 a mistake in the configuration, files or machine
(one message, nothing written), 130 interrupted.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from configs.blocks.block import Block
from configs.blocks.rl import EvalConfig
from configs.blocks.supervised import SLConfig
from configs.reading.load import ConfigError, load, run_directory, to_yaml
from configs.reading.messages import model_of
from orchestration.cluster.launcher_rank import is_first_rank

if TYPE_CHECKING:
    from orchestration.run.directory import RunDirectory

Config = TypeVar("Config", bound=Block)
FAILED, MISTAKEN, INTERRUPTED = 1, 2, 130


def main(
    program: str,
    schema: type[Config],
    example: str,
    run: Callable[[Config, Any, RunDirectory], None],
    arguments: Sequence[str] | None = None,
    report: Callable[[Path], None] | None = None,
) -> int:
    """Parse, check, run; returns the exit code.

    Args:
        program: the script's name, e.g. main_rl.py.
        schema: RLConfig, SLConfig or EvalConfig.
        example: the YAML file to show in examples.
        run: does the job in a run directory that was just made, or whose `resumed_from` says where to go on.
        arguments: the command line without the program; None: sys.argv.
        report: writes the report of a run that is to be resumed and has no step left: it may have been killed before it did.
    """
    parser = _parser(program, schema, example)
    given = parser.parse_args(arguments)
    is_resumed = schema is not EvalConfig and given.resume is not None
    if is_resumed and given.resume and given.run_dir not in (None, given.resume):
        parser.error(f"--resume {given.resume} and --run-dir {given.run_dir} name two folders; give one")
    signal.signal(signal.SIGTERM, _leave)
    try:
        config = load(given.config, schema, given.set, (given.resume or given.run_dir) if is_resumed else given.run_dir)
        directory = _opened_run_directory(config) if is_resumed else None
        checked = _checked(config, is_resumed)
        if given.dry_run:
            _print_plan(config, checked)
            return 0
        if directory is None:
            directory = _made_run_directory(config)
        elif _took_up_what_is_done(config, checked, directory):
            if report is not None and is_first_rank():
                report(directory.path)
            return 0
    except ConfigError as error:
        if is_first_rank():  # all ranks find the same mistakes
            print(f"error: {error}", file=sys.stderr)
        return MISTAKEN
    except KeyboardInterrupt:
        print("interrupted before the run began; nothing was written", file=sys.stderr)
        return INTERRUPTED
    for warning in checked.warnings if is_first_rank() else ():
        print(f"warning: {warning}", file=sys.stderr)
    return _ended(run, config, checked, directory)


def _checked(config: Any, is_resumed: bool) -> Any:
    """Preflight, with the libraries' chatter kept off the screen."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(config, SLConfig):
        from orchestration.start.preflight_sl import supervised_preflight

        return supervised_preflight(config, is_resumed)
    from orchestration.start.preflight import preflight

    return preflight(config, is_resumed)


def _print_plan(config: Any, checked: Any) -> None:
    from orchestration.start.dry_run import print_plan, print_sections

    if not isinstance(config, SLConfig):
        print_plan(config, checked)
    elif is_first_rank():
        from orchestration.start.preflight_sl import plan_sections

        sections, of_what = plan_sections(config, checked), f"{run_directory(config)} ({config.algorithm.name})"
        print_sections(sections, of_what, checked.warnings)


def _made_run_directory(config: Any) -> RunDirectory:
    from orchestration.run.directory import RunDirectory

    try:
        if not is_first_rank():
            return RunDirectory.made_by_first_rank(run_directory(config))
        run = RunDirectory.create(run_directory(config), to_yaml(config), seeds={"run": config.run.seed})
        run.hold()
        return run
    except (ValueError, OSError) as error:
        raise ConfigError(f"run.dir: {error}") from error


def _opened_run_directory(config: Any) -> RunDirectory:
    """Of a run to be resumed. Raises ConfigError when it cannot be."""
    from orchestration.run.resume import opened_to_resume

    by_launcher = int(os.environ.get("WORLD_SIZE", "1"))
    return opened_to_resume(config, by_launcher if isinstance(config, SLConfig) else config.train.ranks)


def _took_up_what_is_done(config: Any, checked: Any, directory: RunDirectory) -> bool:
    """Bring the run directory back to its checkpoint, on the first rank; whether nothing is left to be done."""
    from orchestration.run.resume import DriverState, owes_evaluation, take_up

    assert directory.resumed_from is not None
    steps = checked.steps if isinstance(config, SLConfig) else config.train.steps
    state = DriverState.read(directory.resumed_from)
    is_done = state.step >= steps and not owes_evaluation(directory, state, config)
    if is_first_rank():
        try:
            directory.hold()
        except ValueError as error:
            raise ConfigError(f"--resume: {error}") from error
        for warning in take_up(directory, config):
            print(f"warning: {warning}", file=sys.stderr)
        if is_done:
            print(f"{directory.path} is done: {directory.resumed_from} is of step {state.step} of {steps}")
    return is_done


def _ended(run: Callable[..., None], config: Any, checked: Any, directory: RunDirectory) -> int:
    """Run the job; whatever ends it early becomes one line and an exit code, the traceback goes to the driver's log."""
    try:
        run(config, checked, directory)
    except KeyboardInterrupt:
        print(f"interrupted; what was done is in {directory.path}", file=sys.stderr)
        return INTERRUPTED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKEN
    except Exception as error:  # noqa: BLE001 the last one to hear of it: it is shown, logged and becomes exit code 1
        log = directory.log_path("driver")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        cause = getattr(error, "cause", error)  # what an actor raised, without the tracebacks on its way here
        print(f"failed: {type(cause).__name__}: {_shortened(str(cause))}\nthe traceback is in {log}", file=sys.stderr)
        return FAILED
    return 0


def _shortened(text: str) -> str:
    """At most the first lines of a message: a remote actor's error brings its whole traceback along."""
    lines = text.strip().splitlines()
    return "\n".join(lines[:6] + (["..."] if len(lines) > 6 else []))


def _leave(number: int, frame: Any) -> None:
    """SIGTERM ends the run as Ctrl-C does: context managers close what they opened."""
    raise KeyboardInterrupt


def _parser(program: str, schema: type[Config], example: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python {program}",
        description=inspect.getdoc(schema),
        epilog=_teaching(program, schema, example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help=f"the YAML file of the job, e.g. {example}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace one value; may be given several times"
    )
    parser.add_argument("--run-dir", metavar="FOLDER", help="where the run is written, in place of run.dir/run.name")
    if schema is not EvalConfig:
        parser.add_argument(
            "--resume", nargs="?", const="", metavar="FOLDER",
            help="go on from the newest checkpoint of the run in run.dir/run.name, or of the one in FOLDER",
        )  # fmt: skip
    if schema is SLConfig:
        parser.add_argument(
            "--local_rank", help=argparse.SUPPRESS
        )  # the deepspeed launcher gives it, beside LOCAL_RANK
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    return parser


def _teaching(program: str, schema: type[Block], example: str) -> str:
    """The part of --help below the options: examples, blocks, methods, where more is written."""
    lines = [
        "examples:",
        f"  python {program} --config {example}",
        f"  python {program} --config {example} --dry-run",
        f"  python {program} --config {example} --set run.seed=1 --run-dir {_default_dir(schema)}/seed1",
        f"  python {program} --config {example} --set data.sources.0.size=50   (list items go by number)",
        *([] if schema is EvalConfig else [f"  python {program} --config {example} --resume"]),
        "",
        "blocks of the YAML file (every key: docs/CONFIG.md):",
    ]
    for name, field in schema.model_fields.items():
        block = model_of(field.annotation)
        about = (inspect.getdoc(block) or "").split("\n\n")[0] if block else field.description or ""
        lines += _entry(name + (" *" if field.is_required() else ""), about)
    lines.append("  (* must be given)")
    if "algorithm" in schema.model_fields:
        from plugins.methods import listed

        lines += ["", "methods (algorithm.name; or your own, my_lab.my_loss:Mine):"]
        for name, method in listed().items():
            if method.has_advantages == (schema is not SLConfig):
                lines += _entry(name, method.summary)
    lines += ["", "docs: README.md to begin, docs/CONFIG.md for every key, docs/ARCHITECTURE.md for how it works"]
    return "\n".join(lines)


def _default_dir(schema: type[Block]) -> str:
    return str(Path(schema.model_fields["run"].get_default(call_default_factory=True).dir))


def _entry(name: str, about: str) -> list[str]:
    return textwrap.wrap(
        " ".join(about.split()), width=100, initial_indent=f"  {name:<22}", subsequent_indent=" " * 24
    ) or [f"  {name}"]
