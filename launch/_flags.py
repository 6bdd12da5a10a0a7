"""The part that all launchers share: --config, its overrides, --workdir, --seed, and errors that fit on one screen.

    python -m launch.train --config=configs/calculator.py --workdir=runs/a --seed=1 --config.algorithm.epsilon_low=0.2

`--config` names a Python file with a `get_config()` that returns a `RunConfig`. Overrides are read as the annotation of
their field wants it, so that an unknown field or a value of the wrong type is refused by name. --help lists all fields.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from launch import EXIT_INTERRUPTED, _compilation_cache
from launch._processes import FULL, define_flags, flag_value, joined, joining_of, tell
from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree, field_values
from sao_jax.configuration.listing import listing
from sao_jax.configuration.methods import method_fields
from sao_jax.configuration.module_file import load_module
from sao_jax.configuration.output_folder import check_output_folder
from sao_jax.configuration.paths import check_readable, check_storable, expand, in_bucket, located
from sao_jax.configuration.relations import validate
from sao_jax.configuration.run_record import check_viewed, read_config
from sao_jax.errors import EXIT_BAD_INPUT, EXIT_FAILURE, ConfigError, ProcessFailed, RunError
from sao_jax.huggingface.pretrained import with_folder_shape
from sao_jax.interrupt import Interrupted
from sao_jax.parallel.process import Joining
from sao_jax.report.shown_log import only_what_matters

flags.disclaim_key_flags()  # --help of a launcher shows these flags as its own

EXIT_RESUMABLE = 75  # interrupted and saved, EX_TEMPFAIL of sysexits.h: the same command goes on
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

_OVERRIDE = re.compile(r"--?(?P<no>no)?config\.(?P<path>.+)")
_UNKNOWN_ARGUMENT = re.compile(r"(?P<section>\w+)\.__init__\(\) got an unexpected keyword argument '(?P<name>\w+)'")
_HELP = {"--help", "-help", "-h", "-?", "--helpshort", "-helpshort", "--helpfull", "-helpfull"}


@dataclasses.dataclass(frozen=True)
class CommandLine:
  """A command line as it was read.

  Attributes:
    config: the configuration with its overrides.
    unchanged: that of the file.
    workdir: the working directory, if given.
    explicit: the fields that the overrides have set.
    joining: the place of this process among several, as flags or variables say; None where they say nothing.
  """

  config: RunConfig
  unchanged: RunConfig
  workdir: str | None
  explicit: frozenset[str] = frozenset()
  joining: Joining | None = None


def run(
  main: Callable[[RunConfig, str], Any],
  *,
  training: bool = False,
  writes: bool = True,
  needs_run: bool = True,
  configured: bool = True,
) -> NoReturn:
  """Parses the command line, checks it, and calls `main(config, workdir)`; never returns.

  The configuration is validated here, for `training` or not, before anything is written; `main` need not do it again.
  A launcher may define absl flags of its own. Programs that only look at a run have `writes=False`: without --config
  they take the run's own configuration, and refuse that of another run. The run must be there, unless with
  `needs_run=False` model.checkpoint names a model. `configured=False`: `main` makes nothing of the configuration.

  The exit status is what `main` returns, if it is a number, else 0. Bad input, found here or raised by `main` as
  ConfigError, ends the program with its message on standard error and status 2; a `RunError` or a full disk likewise,
  with status 1; `Interrupted`, and a Ctrl-C for which nothing waits, with one line and status 130.
  """
  try:
    given = read(sys.argv, viewing=not writes, configured=configured)
    workdir = _workdir(given)
    config = given.config
    without_run = not needs_run and bool(config.model.checkpoint)
    if not writes and not without_run and not located(workdir).is_dir():
      raise ConfigError("--workdir", f"there is no directory {workdir}.", "Name the --workdir of a run.")
    if not writes and configured:
      check_viewed(config, expand(workdir), given.explicit)
    made = not in_bucket(workdir) and not os.path.lexists(workdir)
    check_writable(workdir)
  except ConfigError as error:
    refuse(error, joins=True)

  # What absl sets up for a program comes first: logging, and the report of an exception that nobody expected.
  def start(_: Sequence[str]) -> None:
    sys.excepthook = sys.__excepthook__  # from here on `joined` tells the others
    set_up_logging()
    _compilation_cache.enable()
    try:
      with joined(given.joining, _said, flags.FLAGS.join_timeout):
        if configured:
          with _removed_if_refused(workdir if made else None):
            validate(config, training=training)
        status = main(config, workdir)
    except Exception as error:
      status = _said(error)
      if status is None:
        raise
    leave(status if isinstance(status, int) else 0)

  app.run(start, argv=sys.argv[:1], flags_parser=lambda argv: argv)
  raise AssertionError("absl ends the program")


@contextlib.contextmanager
def _removed_if_refused(folder: str | None) -> Iterator[None]:
  """Leaves no empty folder behind a configuration that is refused; None for one that was there before."""
  try:
    yield
  except ConfigError:
    if folder is not None:
      with contextlib.suppress(OSError):  # another process has removed it, or begun to write
        os.rmdir(folder)
    raise


def run_tool(main: Callable[..., Any], *, example: str, joins: bool = False, takes_arguments: bool = False) -> NoReturn:
  """Runs a program without a configuration: its own flags, and the errors, help and statuses of `run`; never returns.

  `example` is a flag of it, to show how flags are written. With `joins` it may take several processes, if flags or
  variables say so. With `takes_arguments` `main` gets a list of what stands beside the flags.
  """
  app.define_help_flags()
  if joins:
    define_flags(flags.FLAGS)
  try:
    if _asks_for_help(sys.argv):
      _show_help(sys.argv[:1], flags.FLAGS)
    arguments = read_flags(sys.argv, flags.FLAGS, example, takes_arguments=takes_arguments)
    place = joining_of(flags.FLAGS) if joins else None
  except ConfigError as error:
    refuse(error, joins=joins)

  def start(_: Sequence[str]) -> None:
    sys.excepthook = sys.__excepthook__  # from here on `joined` tells the others
    set_up_logging()
    try:
      with joined(place, _said, flags.FLAGS.join_timeout) if place else contextlib.nullcontext():
        main(arguments) if takes_arguments else main()
    except (ConfigError, RunError, OSError, Interrupted) as error:
      status = _said(error)
      if status is None:
        raise
      leave(status)

  app.run(start, argv=sys.argv[:1], flags_parser=lambda argv: argv)
  raise AssertionError("absl ends the program")


def _said(error: BaseException) -> int | None:
  """Says what has ended a program, and returns the exit status; None, and nothing is said, if nobody expected it."""
  if isinstance(error, Interrupted):
    logging.info("Interrupted: there is no result.")  # what was begun may lie on the disk, to go on from
    return EXIT_INTERRUPTED
  if isinstance(error, ConfigError):
    sys.stderr.write(f"error: {error}\n")
    return EXIT_BAD_INPUT
  if isinstance(error, KeyboardInterrupt):
    sys.stderr.write("Interrupted.\n")
    return EXIT_INTERRUPTED

  # What lies outside the code.
  text = str(error)
  if isinstance(error, OSError) and error.errno in FULL:
    where = f": {error.filename}" if error.filename else ""  # a write does not tell
    text = f"{error.strerror}{where}. Make room, and run the same command again."
  elif not isinstance(error, RunError):
    return None
  sys.stderr.write(f"error: {text}\n")
  return error.status if isinstance(error, ProcessFailed) else EXIT_FAILURE


def leave(status: int) -> None:
  """Ends the program; unless the work is done, without waiting for what still compiles, or complains, in threads."""
  if status:
    logging.flush()
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    os._exit(status)
  sys.exit(status)


def parse(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS) -> tuple[RunConfig, str]:
  """Returns the configuration with its overrides, and the working directory. Raises ConfigError for bad input."""
  given = read(argv, flag_values)
  return given.config, _workdir(given)


def _workdir(given: CommandLine) -> str:
  """The working directory, which must be given, and of which checkpoints could be read again."""
  if not given.workdir:
    raise ConfigError("--workdir", "it is missing.", "Name a directory to write to, as in --workdir=runs/a.")
  workdir = os.path.expanduser(given.workdir)
  check_storable(expand(workdir), "--workdir")
  return workdir


def read(
  argv: Sequence[str],
  flag_values: flags.FlagValues = flags.FLAGS,
  *,
  viewing: bool = False,
  configured: bool = True,
) -> CommandLine:
  """Reads the command line; --help prints the flags and the fields, and exits. Raises ConfigError for bad input.

  With `viewing`, the configuration that the run in --workdir has recorded is the one where --config is left out; with
  `configured=False` it may be missing there, too.
  """
  flags.DEFINE_string("config", None, "Python file whose get_config() returns a RunConfig.", flag_values=flag_values)
  flags.DEFINE_string("workdir", None, "Directory of checkpoints, metrics and reports.", flag_values=flag_values)
  flags.DEFINE_integer("seed", None, "Sets training.seed.", lower_bound=0, flag_values=flag_values)
  flags.DEFINE_string("method", None, "Sets the fields of a method, as in grpo.", flag_values=flag_values)
  flags.DEFINE_string("profile_steps", None, "Sets training.profile_steps, as in 10,12.", flag_values=flag_values)
  define_flags(flag_values)
  app.define_help_flags()
  path = flag_value(argv, "config")
  if _asks_for_help(argv):
    _show_help(argv[:1], flag_values, RunConfig(environment=None) if path is None else load_config(path))
  unchanged = load_config(path) if path is not None else _recorded(argv, viewing=viewing, configured=configured)

  # What is left of the command line once the fields are taken out is for absl.
  overrides, rest = _take_overrides(argv, unchanged)
  read_flags(rest, flag_values, "--workdir=runs/a")
  if flag_values["method"].value is not None:
    overrides = {**method_fields(flag_values["method"].value), **overrides}
  if flag_values["seed"].value is not None:
    overrides["training.seed"] = flag_values["seed"].value
  if flag_values["profile_steps"].value is not None:
    annotation = next(found for path, _, found in config_tree.leaves(unchanged) if path == "training.profile_steps")
    steps = flag_values["profile_steps"].value
    overrides["training.profile_steps"] = field_values.parse(steps, annotation, "training.profile_steps")
  config = with_folder_shape(config_tree.replace(unchanged, overrides), overrides)
  return CommandLine(config, unchanged, flag_values["workdir"].value, frozenset(overrides), joining_of(flag_values))


def _recorded(argv: Sequence[str], *, viewing: bool, configured: bool) -> RunConfig:
  """The configuration of the run in --workdir. Raises ConfigError when --config is needed."""
  workdir = flag_value(argv, "workdir")
  if not (viewing and workdir):
    raise ConfigError("--config", "it is missing.", f"Pass one, as in --config={_configs()[0]}.")
  if in_bucket(workdir):
    check_readable(located(workdir), "--workdir")
  if not expand(workdir).is_dir():
    raise ConfigError("--workdir", f"there is no directory {workdir}.", "Name the --workdir of a run.")
  try:
    return read_config(expand(workdir))
  except ConfigError:
    if configured:
      raise
    return RunConfig(environment=None)


def load_config(path: str) -> RunConfig:
  """Runs `get_config()` of the Python file at `path`, relative to the current folder or to the repository."""
  path = os.path.expanduser(path)
  file = next((place for place in (pathlib.Path(path), REPOSITORY / path) if place.is_file()), None)
  if file is None:
    raise ConfigError("--config", f"there is no file {path}.", f"Choose one of {', '.join(_configs())}, or write one.")

  # A field that a section does not have is a TypeError of Python; any other error is shown as it is.
  try:
    module = load_module(file)
    if module is None:
      raise ConfigError("--config", f"{path} is not a Python file.", "Name a .py file that defines get_config().")
    if not hasattr(module, "get_config"):
      raise ConfigError("--config", f"{path} defines no get_config().", "Add a function that returns a RunConfig.")
    config = module.get_config()
  except TypeError as error:
    unknown = _unknown_argument(error, file)
    if unknown is None:
      raise
    raise unknown from error

  if not isinstance(config, RunConfig):
    got = type(config).__name__
    raise ConfigError("--config", f"get_config() of {path} returned a {got}.", "Return a sao_jax.config.RunConfig.")
  config_tree.check_types(config)
  return config


def check_writable(workdir: str) -> None:
  """Creates `workdir` and a file in it; raises ConfigError when that is not permitted."""
  remedy = "Pass a --workdir on a mounted file system where you may write, as in --workdir=runs/a."
  if in_bucket(workdir):
    _check_bucket(workdir, "--workdir")
    return
  if "://" in workdir:
    raise ConfigError("--workdir", f"{workdir} is a remote address.", f"{remedy} Or one in a bucket, gs://BUCKET/DIR.")
  try:
    os.makedirs(workdir, exist_ok=True)
    with tempfile.TemporaryFile(dir=workdir):
      pass
  except OSError as error:
    raise ConfigError("--workdir", f"cannot write to {workdir}: {error.strerror}.", remedy) from error


def _check_bucket(folder: str, field: str) -> None:
  """Writes an object and removes it; raises ConfigError when that is not permitted, or there is no such bucket."""
  check_readable(located(folder), field)
  probe = located(folder) / f".{socket.gethostname()}.{os.getpid()}"
  try:
    probe.write_bytes(b"")
    probe.unlink()
  except Exception as error:  # of gcsfs, the library that it uses, or the network
    remedy = "Name a bucket that this machine may write to; gcloud auth application-default login says who you are."
    raise ConfigError(field, f"cannot write to {folder}: {error!r:.300}.", remedy) from error


def check_output(path: str) -> None:
  """Refuses an --output that cannot be made or is not empty, before any work. Raises ConfigError."""
  if in_bucket(path):
    _check_bucket(path, "--output")
    return
  check_output_folder(path, "--output")


def _asks_for_help(argv: Sequence[str]) -> bool:
  return any(argument in _HELP for argument in argv)


def _show_help(argv: Sequence[str], flag_values: flags.FlagValues, config: RunConfig | None = None) -> NoReturn:
  """Prints what absl says of the flags, then the fields of the configuration; ends the program, which has done it."""
  with contextlib.suppress(SystemExit):  # absl's, with the status of a failure
    flag_values([*argv, "--help"])
  if config is not None:
    sys.stdout.write(f"\nFields of --config, to be set as in --config.training.steps=5:\n\n{listing(config)}")
  sys.exit(0)


def read_flags(
  argv: Sequence[str], flag_values: flags.FlagValues, example: str, *, takes_arguments: bool = False
) -> list[str]:
  """Has absl read the flags; returns what is no flag, if the program takes any.

  Raises:
    ConfigError: for a flag that is unknown or wrong, and for what is no flag where none is taken.
  """
  try:
    left_over = flag_values(argv)[1:]
  except flags.Error as error:
    raise _flag_error(error) from error
  if left_over and not takes_arguments:
    raise ConfigError("command line", f"unexpected {left_over[0]!r}.", f"Flags begin with --, as in {example}.")
  return left_over


def _take_overrides(argv: Sequence[str], config: RunConfig) -> tuple[dict[str, Any], list[str]]:
  """Splits off `--config.PATH=VALUE`, `--config.PATH VALUE`, and `--config.PATH` or `--noconfig.PATH` of booleans."""
  annotations = {path: annotation for path, _, annotation in config_tree.leaves(config_tree.filled(config))}
  overrides, rest, queue = {}, [], collections.deque(argv)
  while queue:
    argument = queue.popleft()
    flag, given, text = argument.partition("=")
    match = _OVERRIDE.fullmatch(flag)
    if match is None:
      rest.append(argument)
      continue

    path = match["path"]
    if path not in annotations:
      config_tree.replace(config, {path: None})  # a section or an unknown name: raises the right error for either
    if field_values.is_switch(annotations[path]) and not given:
      overrides[path] = not match["no"]
      continue
    if match["no"]:
      raise ConfigError(path, f"{flag} sets what is true or false to false.", f"Pass --config.{path}=VALUE.")

    if not given and not queue:
      raise ConfigError(path, "it has no value.", f"Give one, as in --config.{path}=VALUE.")
    overrides[path] = field_values.parse(text if given else queue.popleft(), annotations[path], path)
  return overrides, rest


def _unknown_argument(error: TypeError, file: pathlib.Path) -> ConfigError | None:
  """The error for a field that a config file gives to a section without it; None for any other TypeError."""
  match = _UNKNOWN_ARGUMENT.search(str(error))
  if match is None:
    return None
  section, name = match["section"], match["name"]
  loaded = [module for name, module in list(sys.modules.items()) if name.startswith(("sao_jax.", "sao_jax_"))]
  loaded.sort(key=lambda module: getattr(module, "__file__", None) != str(file.absolute()))
  found = (vars(module).get(section) for module in loaded)
  class_ = next((each for each in found if dataclasses.is_dataclass(each)), None)
  if class_ is None:
    return None

  known = [field.name for field in dataclasses.fields(class_)]
  problem = f"there is no such field; {file} sets it."
  return config_tree.unknown_field(f"{section}.{name}", known, problem, f"Its fields are {', '.join(known)}.")


def _flag_error(error: flags.Error) -> ConfigError:
  problem = str(error).removesuffix(" ?") + ("?" if str(error).endswith("?") else ".")
  return ConfigError("command line", problem, "--help lists the flags.")


def _configs() -> list[str]:
  return sorted(f"configs/{path.name}" for path in (REPOSITORY / "configs").glob("[!_]*.py")) or ["configs/NAME.py"]


def set_up_logging() -> None:
  """The log tells what this project does; of the libraries below it, what went wrong."""
  if flags.FLAGS["verbosity"].using_default_value:
    logging.set_verbosity(logging.INFO)
  only_what_matters()


def refuse(error: ConfigError, *, joins: bool = False) -> None:
  """Ends the program with the error on standard error and the exit status of bad input.

  With `joins` the other processes are told, with which this one would have run it.
  """
  sys.stderr.write(f"error: {error}\n")
  if joins:
    tell(sys.argv, error, EXIT_BAD_INPUT)
  sys.exit(EXIT_BAD_INPUT)
