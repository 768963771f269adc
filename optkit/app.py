"""The `optkit` command: ls, show, check, cp, run, sweep, evidence, checkpoint, doctor, and plain Hydra overrides.

Exit codes: 0 nothing failed, 1 a check failed, 2 bad input (one line per problem on standard error, nothing written).
Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import optkit
from optkit.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError, did_you_mean

INTRO = """optkit turns a YAML recipe into a verified decode megakernel and hands it to vLLM.

commands
  optkit ls                              the recipes, one line each
  optkit show RECIPE [--why KEY]         the resolved recipe, with the source of every value
  optkit check RECIPE [KEY=VALUE ...]    model, plan and proofs; writes nothing
  optkit check --planted [RECIPE]        plants every known fault and says which gate catches it
  optkit cp RECIPE DEST.yaml             a copy to edit
  optkit run RECIPE [KEY=VALUE ...]      everything: model, plan, check, emit, validate, export, evidence
  optkit sweep recipe=A,B KEY=V1,V2 ...  the whole grid, one process and folder per job
  optkit evidence show|verify|merge RUN  what is known about a run; digests again; hardware results into it
  optkit checkpoint CONFIG DIR           a checkpoint with random weights, for trying things out
  optkit doctor                          versions, GPU and plugins of this machine

examples
  optkit run kimi_k3/tiny
  optkit run kimi_k3/tiny sync=tagged decode.batch=4
  optkit cp kimi_k3/tiny mine.yaml && optkit check ./mine.yaml && optkit run ./mine.yaml
  optkit sweep recipe=kimi_k3/tiny decode.batch=1,4 sync=counter,tagged --jobs 2

RECIPE is a name from `optkit ls` or the path of a .yaml file; names are looked up in $OPTKIT_RECIPES, ./recipes and
the package. Plain Hydra works too: `optkit recipe=kimi_k3/tiny sync=tagged`, `optkit -m recipe=a,b`. Every key:
docs/recipe.md. `optkit COMMAND --help` has more."""


class _Parser(argparse.ArgumentParser):
    """argparse, with a suggestion for a misspelt option."""

    def error(self, message: str) -> None:  # type: ignore[override]
        message = message.replace(
            ", KEY=VALUE", ""
        )  # argparse calls an empty "nargs=*" missing beside a missing RECIPE
        known = [s for a in self._actions for s in a.option_strings]
        for word in message.split():
            if word.startswith("--") and word.rstrip(":") not in known:
                hint = did_you_mean(word, known)
                message += f"; {hint}" if hint else ""
        raise UserError(f"{self.prog}: {message}")


def _recipe_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?" if optional else None,
        help="a name from `optkit ls`, or the path of a .yaml file",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="any key or group of the recipe (docs/recipe.md), e.g. sync=tagged",
    )


def _until(parser: argparse.ArgumentParser) -> None:
    from optkit.steps import STEPS

    parser.add_argument("--until", metavar="STEP", help=f"stop after this step: {', '.join(s.name for s in STEPS)}")


def _parser(command: str, doc: str, example: str) -> argparse.ArgumentParser:
    return _Parser(prog=f"optkit {command}", description=doc, epilog=f"example: {example}", allow_abbrev=False)


def _ls(argv: Sequence[str]) -> int:
    parser = _parser("ls", "List the recipes: name and description.", "optkit ls")
    parser.parse_args(argv)
    from optkit.locate import ignored_files, list_recipes

    recipes = list(list_recipes())
    width = max((len(r.name) for r in recipes), default=0)
    names = [r.name for r in recipes]
    for r in recipes:
        twice = "" if names.count(r.name) == 1 else f" (ambiguous: {r.path})"
        print(f"{r.name:<{width}}  {r.description}{twice}")
    for path in ignored_files():
        print(f"ignored: {path}: a recipe's name must end in .yaml", file=sys.stderr)
    return 0


def _show(argv: Sequence[str]) -> int:
    parser = _parser(
        "show",
        "Print a recipe fully resolved, each value with its source.",
        "optkit show kimi_k3/tiny --why decode.batch",
    )
    _recipe_arguments(parser)
    parser.add_argument(
        "--why", metavar="KEY", help="every layer that sets this key, weakest first; the last one counts"
    )
    args = parser.parse_intermixed_args(argv)
    from optkit.compose import flow, resolve
    from optkit.recipe import schema_fields

    resolved = resolve(args.recipe, args.overrides)
    if args.why is None:
        print(resolved.yaml(sources=True), end="")
        print(f"# digest {resolved.digest}")
        return 0
    known = [k for k, _ in schema_fields()]
    if args.why not in known:
        raise UserError(
            f"--why {args.why!r}: expected a key of the schema; {did_you_mean(args.why, known)}".rstrip("; ")
        )
    history = resolved.history(args.why)
    for number, (source, value) in enumerate(history, 1):
        mark = "->" if number == len(history) else "  "
        print(f"{mark} {args.why}: {flow(value)}  ({source})")
    return 0


def _check(argv: Sequence[str]) -> int:
    parser = _parser(
        "check", "Build model and plan and prove the plan; writes nothing.", "optkit check kimi_k3/h200_tp8_pp2"
    )
    _recipe_arguments(parser, optional=True)
    parser.add_argument("--plain", action="store_true", help="no spinner, no colour")
    parser.add_argument(
        "--planted",
        action="store_true",
        help="are the gates able to fail? plant every fault of the library "
        "in this recipe (default: the tiny ones) and say which gate caught it",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --planted: write the table here, as JSON")
    parser.add_argument("--jobs", type=int, metavar="N", help="with --planted: processes (default 2)")
    args = parser.parse_intermixed_args(argv)
    if args.planted:
        from optkit.planted import check_planted

        return check_planted(args.recipe, args.overrides, args.out, args.jobs)
    if args.recipe is None:
        parser.error("expected a RECIPE")
    from optkit.compose import resolve
    from optkit.run import check_recipe

    return check_recipe(resolve(args.recipe, args.overrides), plain=args.plain)


def _cp(argv: Sequence[str]) -> int:
    parser = _parser("cp", "Copy a recipe to a file of your own.", "optkit cp kimi_k3/tiny mine.yaml")
    parser.add_argument("recipe", metavar="RECIPE", help="a name from `optkit ls`, or the path of a .yaml file")
    parser.add_argument("dest", metavar="DEST.yaml", type=Path, help="the new file; nothing is overwritten")
    args = parser.parse_args(argv)
    from optkit.locate import find_recipe

    source = find_recipe(args.recipe)
    if args.dest.suffix != ".yaml":
        raise UserError(f"{args.dest}: expected a file name that ends in .yaml")
    if not args.dest.parent.is_dir():
        raise UserError(f"{args.dest}: expected an existing folder, {args.dest.parent} is none")
    try:
        with args.dest.open("x", encoding="utf-8") as out:
            out.write(source.path.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{args.dest}: exists already; choose another name") from None
    print(f"{args.dest}  (optkit run {args.dest if args.dest.parent != Path('.') else './' + args.dest.name})")
    return 0


def _run(argv: Sequence[str]) -> int:
    parser = _parser(
        "run",
        "Run a recipe; results go to outputs/<recipe>/<UTC time>-<digest>/.",
        "optkit run kimi_k3/tiny sync=tagged",
    )
    _recipe_arguments(parser)
    parser.add_argument(
        "--outputs",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="parent of all run folders (default: outputs)",
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="use exactly this new folder (sweeps do)")
    _until(parser)
    parser.add_argument("--plain", action="store_true", help="no spinner, no colour")
    args = parser.parse_intermixed_args(argv)
    from optkit.compose import resolve
    from optkit.run import run_recipe

    recipe = args.recipe.removeprefix("recipe=")
    if "=" in recipe:
        raise UserError(f"{recipe!r}: expected a recipe first: optkit run RECIPE [KEY=VALUE ...]")
    return run_recipe(
        resolve(recipe, args.overrides), outputs=args.outputs, folder=args.dir, until=args.until, plain=args.plain
    )


def _sweep(argv: Sequence[str]) -> int:
    from optkit.sweep import sweep_command

    parser = _parser(
        "sweep",
        "Run the whole grid of the given values, each job in its own process and folder.",
        "optkit sweep recipe=kimi_k3/tiny decode.batch=1,4 sync=counter,tagged",
    )
    _until(parser)
    return sweep_command(argv, parser)


def _doctor(argv: Sequence[str]) -> int:
    parser = _parser("doctor", "Show versions, GPU, tools and plugins; writes nothing.", "optkit doctor")
    parser.parse_args(argv)
    from optkit.doctor import doctor

    return doctor()


def _evidence(argv: Sequence[str]) -> int:
    from optkit.evidence import main_evidence
    from optkit.export.seal import seal

    return main_evidence(argv, seal)


def _checkpoint(argv: Sequence[str]) -> int:
    parser = _parser(
        "checkpoint",
        "Write a checkpoint with random weights for a model configuration (safetensors, config.json).",
        "optkit checkpoint kimi_k3_tiny ./tiny-k3 --shards 2",
    )
    from optkit.models.families import config_names

    packaged = ", ".join(config_names())
    parser.add_argument("config", metavar="CONFIG", help=f"one of {packaged}, or the path of a config.json")
    parser.add_argument("dir", metavar="DIR", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--shards", type=int, default=1, help="safetensors files to spread them over (default 1)")
    args = parser.parse_args(argv)
    from optkit.build import read_config
    from optkit.models.checkpoint import write_random

    try:
        path = write_random(args.dir, read_config(args.config, "command line"), args.seed, args.shards)
    except (ValueError, OSError) as err:
        if isinstance(err, UserError):
            raise
        raise UserError(f"optkit checkpoint: {line}" for line in str(err).splitlines()) from err
    print(f"{path}: {sum(f.stat().st_size for f in path.iterdir()) / 1e6:.1f} MB")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "ls": _ls,
    "show": _show,
    "check": _check,
    "cp": _cp,
    "run": _run,
    "sweep": _sweep,
    "evidence": _evidence,
    "checkpoint": _checkpoint,
    "doctor": _doctor,
}


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(INTRO)
        return 0
    first, rest = argv[0], argv[1:]
    if first in ("-V", "--version"):
        print(f"optkit {optkit.__version__}")
        return 0
    if first in ("-m", "--multirun"):
        return _sweep(rest)
    if first in COMMANDS:
        return COMMANDS[first](rest)
    if "=" in first:  # plain Hydra: overrides only
        chosen = [a for a in argv if a.startswith("recipe=")]
        others = [a for a in argv if not a.startswith("recipe=")]
        if "-m" in others or "--multirun" in others:
            return _sweep([a for a in argv if a not in ("-m", "--multirun")])
        if len(chosen) != 1:
            raise UserError("recipe: expected exactly one recipe=NAME (command line)")
        return _run([chosen[0], *others])
    hint = did_you_mean(first, COMMANDS) or f"known: {', '.join(COMMANDS)}"
    raise UserError(f"optkit {first!r}: expected a command; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except UserError as err:
        for problem in err.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `optkit show ... | head`
        sys.stderr.close()
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as shells count a program ended by Ctrl-C
    except OSError as err:  # a folder that cannot be written, a full disk: the machine's fault, said in one line
        print(f"error: {err}", file=sys.stderr)
        return EXIT_BAD_INPUT
