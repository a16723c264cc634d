"""The command line that main_rl.py, main_sl.py and main_eval.py share: arguments, help, and how a command ends.

Exit codes: 0 done, 1 the run failed (its log holds the traceback), 2 a mistake in the configuration, files or machine
(one message, nothing written), 130 interrupted.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from configs.blocks.block import Block
from configs.reading.load import ConfigError, load, run_directory, to_yaml
from configs.reading.messages import model_of
from orchestration.cluster.launcher_rank import is_first_rank
from orchestration.start.job_kind import AnyConfig, Config, Data, JobKind, TrainingConfig
from plugins.kinds import listed

if TYPE_CHECKING:
    from orchestration.run.directory import RunDirectory
    from orchestration.start.preflight import Checked

FAILED, MISTAKEN, INTERRUPTED = 1, 2, 130


def main(kind: JobKind[Config, Data], arguments: Sequence[str] | None = None) -> int:
    """Parse, check, load the data and run; return the exit code.

    arguments: the command line without the program; None: sys.argv.
    """
    parser = _parser(kind)
    given = parser.parse_args(arguments)
    resumes = kind.training if kind.training is not None and given.resume is not None else None
    if resumes is not None and given.resume and given.run_dir not in (None, given.resume):
        parser.error(f"--resume {given.resume} and --run-dir {given.run_dir} name two folders; give one")
    signal.signal(signal.SIGTERM, _leave)
    try:
        config = load(
            given.config, kind.schema, given.set, (given.resume or given.run_dir) if resumes else given.run_dir
        )
        directory = None
        if resumes is not None:
            from orchestration.run.resume import opened_to_resume

            directory = opened_to_resume(_resumable(config), resumes.ranks(config))
        checked, data = checked_with_data(kind, config, is_resumed=directory is not None)
        warnings = [*checked.warnings, *kind.data_warnings(config, data)]
        if given.dry_run:
            if is_first_rank():
                from orchestration.start.plan import print_plan

                warnings += kind.tried(config, data)
                print_plan(kind.plan(config, checked, data), warnings)
            return 0
        if directory is None or resumes is None:
            directory = _made_run_directory(config)
        elif _took_up_what_is_done(_resumable(config), resumes.steps(config, data), directory):
            if is_first_rank():
                resumes.report(directory.path)
            return 0
    except ConfigError as error:
        if is_first_rank():  # all ranks find the same mistakes
            print(f"error: {error}", file=sys.stderr)
        return MISTAKEN
    except KeyboardInterrupt:
        print("interrupted before the run began; nothing was written", file=sys.stderr)
        return INTERRUPTED
    for warning in warnings if is_first_rank() else ():
        print(f"warning: {warning}", file=sys.stderr)
    go_on = ["--config", given.config, *(word for key in given.set for word in ("--set", key)), "--resume"]
    command = shlex.join(["python", kind.program, *go_on, str(directory.path)]) if kind.training is not None else ""
    return _ended(kind.run, config, data, directory, command)


def checked_with_data(kind: JobKind[Config, Data], config: Config, is_resumed: bool = False) -> tuple[Checked, Data]:
    """Check files and machine, and load the data, so that every requirement is met before anything heavy starts.

    is_resumed: the run directory holds the run to be resumed.

    Raises:
        ConfigError: with every problem found, each naming its key or file and the remedy.
    """
    from orchestration.model.checkpoint_facts import model_facts
    from orchestration.run.checksums import check_checkpoint
    from orchestration.start.problems import Problems

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library warns of it on the screen
    problems = Problems()
    for folder in filter(None, (config.model.path, getattr(getattr(config, "lora", None), "adapter", None))):
        problems.attempt(check_checkpoint, folder)
    model = problems.attempt(model_facts, config.model) if not problems.texts else None
    checked = kind.preflight(config, model, is_resumed, problems)
    data = problems.attempt(kind.load_data, config) if model is not None else None
    problems.raise_all()
    assert checked is not None and data is not None
    return checked, data


def _made_run_directory(config: AnyConfig) -> RunDirectory:
    from orchestration.run.directory import RunDirectory

    try:
        if not is_first_rank():
            return RunDirectory.made_by_first_rank(run_directory(config))
        run = RunDirectory.create(run_directory(config), to_yaml(config), seeds={"run": config.run.seed})
        run.hold()
        return run
    except (ValueError, OSError) as error:
        raise ConfigError(f"run.dir: {error}") from error


def _resumable(config: AnyConfig) -> TrainingConfig:
    """Return the configuration with the type of a job that trains. Only JobKind.training says that it is one."""
    return cast(TrainingConfig, config)


def _took_up_what_is_done(config: TrainingConfig, steps: int, directory: RunDirectory) -> bool:
    """Bring the run directory back to its checkpoint, on the first rank; return whether nothing is left to be done."""
    from orchestration.run.resume import DriverState, owes_evaluation, resume_run

    assert directory.resumed_from is not None
    state = DriverState.read(directory.resumed_from)
    is_done = state.step >= steps and not owes_evaluation(directory, state, config)
    if is_first_rank():
        try:
            directory.hold()
        except ValueError as error:
            raise ConfigError(f"--resume: {error}") from error
        for warning in resume_run(directory, config):
            print(f"warning: {warning}", file=sys.stderr)
        if is_done:
            directory.prune_checkpoints(config.checkpoint.keep)  # it may have been killed before it did
            print(f"{directory.path} is done: {directory.resumed_from} is of step {state.step} of {steps}")
    return is_done


def _ended(
    run: Callable[[Config, Data, RunDirectory], None], config: Config, data: Data, directory: RunDirectory, command: str
) -> int:
    """Run the job; turn an error into one line and an exit code, and write its traceback into the driver's log.

    command: what goes on with the run, for those that end too early.
    """
    try:
        run(config, data, directory)
    except KeyboardInterrupt:
        print(f"interrupted; what was done is in {directory.path}{_way_on(directory, command)}", file=sys.stderr)
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
        print(_way_on(directory, command).lstrip("\n"), end="", file=sys.stderr)
        return FAILED
    return 0


def _way_on(directory: RunDirectory, command: str) -> str:
    """Return the lines that say how to go on with a run that ended too early; none for other ranks and evaluations."""
    from orchestration.run.resume import how_to_resume

    if not command or not is_first_rank():
        return ""
    by = ", with the launcher as before" if "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"] != "1" else ""
    said = how_to_resume(directory)
    return f"\n{said}" + (f"\ngo on{by}: {command}\n" if said.startswith("Go on") else "\n")


def _shortened(text: str) -> str:
    """Return at most the first lines of a message, because a remote actor's error contains its whole traceback."""
    lines = text.strip().splitlines()
    return "\n".join(lines[:6] + (["..."] if len(lines) > 6 else []))


def _leave(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt on SIGTERM, as on Ctrl-C, so that context managers close what they opened."""
    raise KeyboardInterrupt


def _parser(kind: JobKind[Config, Data]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python {kind.program}",
        description=inspect.getdoc(kind.schema),
        epilog=_teaching(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help=f"the YAML file of the job, e.g. {kind.example}"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace one value; may be given several times"
    )
    parser.add_argument("--run-dir", metavar="FOLDER", help="where the run is written, in place of run.dir/run.name")
    if kind.training is not None:
        parser.add_argument(
            "--resume", nargs="?", const="", metavar="FOLDER",
            help="go on from the newest checkpoint of the run in run.dir/run.name, or of the one in FOLDER",
        )  # fmt: skip
        if kind.training.has_launcher:
            parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed gives it, beside LOCAL_RANK
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, score a made-up response, print the plan"
    )
    return parser


def _teaching(kind: JobKind[Config, Data]) -> str:
    """Return the part of --help below the options: examples, blocks, methods, and further documents."""
    command = f"  python {kind.program} --config {kind.example}"
    lines = [
        "examples:",
        command,
        f"{command} --dry-run",
        f"{command} --set run.seed=1 --run-dir {_default_dir(kind.schema)}/seed1",
        f"{command} --set data.sources.0.size=50   (list items go by number)",
        *([f"{command} --resume"] if kind.training is not None else []),
        "",
        "blocks of the YAML file (every key: docs/CONFIG.md):",
    ]
    for name, field in kind.schema.model_fields.items():
        block = model_of(field.annotation)
        about = (inspect.getdoc(block) or "").split("\n\n")[0] if block else field.description or ""
        lines += _entry(name + (" *" if field.is_required() else ""), about)
    lines.append("  (* must be given)")
    if kind.training is not None:
        lines += ["", "methods (algorithm.name; or your own, my_lab.my_loss:Mine):"]
        for name, method in listed("method").items():
            if method.has_advantages == kind.training.from_rewards:
                lines += _entry(name, method.summary)
    lines += ["", "docs: README.md to begin, docs/CONFIG.md for every key, docs/ARCHITECTURE.md for how it works"]
    return "\n".join(lines)


def _default_dir(schema: type[Block]) -> str:
    return str(Path(schema.model_fields["run"].get_default(call_default_factory=True).dir))


def _entry(name: str, about: str) -> list[str]:
    return textwrap.wrap(
        " ".join(about.split()), width=100, initial_indent=f"  {name:<22}", subsequent_indent=" " * 24
    ) or [f"  {name}"]
