"""The command ``sglang-dflash``: checks the installation, runs the demo, reads dumps, trains, and compares.

Parsing imports neither torch nor SGLang, so that ``--help`` is instant; each subcommand imports what it runs. This module
only translates: arguments into a call, its result into lines of text and an exit code. 0 is success, 1 a check that does
not hold, 2 an error that the user can act on (one message, no traceback unless ``--traceback``), 130 an interruption.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

PROGRAM = "sglang-dflash"
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; ``sys.argv[1:]`` where None.

    Raises:
        SystemExit: from argparse, for ``--help`` (code 0) and for arguments that do not parse (code 2).
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if getattr(args, "traceback", False) or not _is_for_the_user(error):
            raise
        print(f"{PROGRAM}: error: {_message(error)}", file=sys.stderr)
        return 2


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message alone helps. Of RuntimeErrors only our own do: others come from torch and need their traceback."""
    if isinstance(error, RuntimeError):
        return type(error).__module__.split(".")[0] == "sglang_dflash"
    if isinstance(error, ModuleNotFoundError):
        return (error.name or "sglang_dflash").split(".")[0] != "sglang_dflash"
    return True


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}, which this command needs. Run: pip install 'sglang-dflash[demo,train]'"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    # SUPPRESS: a subparser's default would overwrite what was given before the subcommand.
    common.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error was raised"
    )
    parser = argparse.ArgumentParser(
        prog=PROGRAM, parents=[common], description="Block-diffusion speculative decoding for SGLang."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("check", parents=[common], help="does the installed SGLang fit the plugin?")
    command.set_defaults(run=_check)

    command = commands.add_parser("demo", parents=[common], help="dump, train, serve and compare a small model")
    command.add_argument("--work-dir", type=Path, default=_default_work_dir(), help="default: %(default)s")
    command.add_argument("--fresh", action="store_true", help="make everything again, also what an earlier run left")
    command.set_defaults(run=_demo)

    _add_dump(commands, common)

    command = commands.add_parser("train", parents=[common], help="train a drafter on a dump")
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the run's sections")
    command.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that win over the file, as optim.lr=3e-4"
    )
    command.set_defaults(run=_train)

    _add_bench(commands, common)
    return parser


def _add_dump(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    group = commands.add_parser("dump", parents=[common], help="look at dumped hidden states")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    for name, run, text in (
        ("inspect", _dump_inspect, "what a dump holds, from its index"),
        ("verify", _dump_verify, "read every row and compare every checksum"),
    ):
        action = actions.add_parser(name, parents=[common], help=text)
        action.add_argument("dir", type=Path, metavar="DIR", help="directory of the dump")
        action.set_defaults(run=run)


def _add_bench(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    group = commands.add_parser("bench", parents=[common], help="measure")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    action = actions.add_parser("compare", parents=[common], help="no drafter, the chain and trees on the same prompts")
    action.add_argument("--target", type=Path, required=True, metavar="DIR", help="Hugging Face folder of the target")
    action.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="folder of the drafter")
    action.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSONL file of prompts")
    action.add_argument("--output", type=Path, required=True, metavar="DIR", help="receives logs and results")
    action.add_argument(
        "--widths",
        type=_at_least(2),
        nargs="+",
        default=[5, 17, 33],
        metavar="N",
        help="tree nodes + 1 (default: 5 17 33)",
    )
    action.add_argument("--max-new-tokens", type=_at_least(1), default=256, metavar="N", help="default: %(default)s")
    action.add_argument("--repetitions", type=_at_least(1), default=3, metavar="N", help="default: %(default)s")
    action.set_defaults(run=_bench_compare)


class _at_least:  # noqa: N801 - reads as a function where it is used
    """argparse type: a whole number that is not below a minimum."""

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self._minimum - 1
        if value < self._minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {self._minimum} or more")
        return value


def _default_work_dir() -> Path:
    # The XDG specification: an empty or relative value counts as unset.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / PROGRAM / "demo"


def _check(args: argparse.Namespace) -> int:
    from sglang_dflash.contract import check

    with warnings.catch_warnings():
        # SGLang warns, module by module, of everything that needs another device than this machine's.
        warnings.simplefilter("ignore", UserWarning)
        report = check()
    print(report)
    return 0 if report.ok else 1


def _demo(args: argparse.Namespace) -> int:
    from sglang_dflash.bench.demo import run_demo

    run_demo(args.work_dir, fresh=args.fresh)
    return 0


def _dump_inspect(args: argparse.Namespace) -> int:
    from sglang_dflash.dump.reader import DumpReader

    reader = DumpReader(args.dir)
    for name, value in {"id": reader.manifest.id.hex(), **asdict(reader.manifest)}.items():
        print(f"{name + ':':20} {', '.join(map(str, value)) if isinstance(value, tuple) else value}")
    samples = reader.samples()
    generated = sum(sample.length - sample.prompt_len for sample in samples)
    print(f"{'requests:':20} {len(samples)}")
    print(f"{'positions:':20} {sum(sample.length for sample in samples)}, {generated} of them generated")
    print(f"{'rows stored:':20} {reader.num_rows}")
    _print_list("damage", reader.damage)
    return 1 if reader.damage else 0


def _dump_verify(args: argparse.Namespace) -> int:
    from sglang_dflash.dump.reader import DumpReader

    report = DumpReader(args.dir).verify()
    print(
        f"{args.dir}: {report.samples} requests, {report.rows} rows in {report.records} records, {report.segments} "
        f"segments: {'whole' if report.ok else 'NOT WHOLE'}"
    )
    _print_list("problems", report.problems)
    return 0 if report.ok else 1


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"{title} ({len(lines)}):")
    for line in lines:
        print(f"  {line}")


def _train(args: argparse.Namespace) -> int:
    from sglang_dflash.train.config import load_config
    from sglang_dflash.train.loop import train

    result = train(load_config(args.config, args.overrides))
    print(f"steps:           {result.steps} in {result.seconds:.0f} s, final loss {result.final_loss:.3f}")
    print(f"simulated tau:   {result.seen.tau:.2f} on requests seen in training")
    if result.held_out is None:
        print("                 no requests were held out (data.holdout_fraction)")
    else:
        print(f"                 {result.held_out.tau:.2f} on held-out requests")
    print(f"drafter:         {result.drafter}")
    if result.interrupted:
        print("The run was interrupted and the drafter is an early one; loop.resume=true goes on from the checkpoint.")
        return INTERRUPTED
    return 0


def _bench_compare(args: argparse.Namespace) -> int:
    from sglang_dflash.bench.compare import run_compare

    for folder in (args.target, args.drafter):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a directory; --target and --drafter are Hugging Face folders.")
    table = run_compare(
        target=args.target,
        drafter=args.drafter,
        prompts=args.prompts,
        output=args.output,
        widths=args.widths,
        max_new_tokens=args.max_new_tokens,
        repetitions=args.repetitions,
    )
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
