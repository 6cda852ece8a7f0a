"""What the programs of this folder do alike with their flags."""

import sys
from collections.abc import Callable

from absl import flags


def parser(define: Callable[[], None]) -> Callable[[list[str]], list[str]]:
  """A ``flags_parser`` of ``absl.app.run``.

  Whatever is wrong with the flags is one line, and exit status 2.

  Args:
    define: Defines the program's flags.
  """

  def parse(argv: list[str]) -> list[str]:
    try:
      define()
      rest = flags.FLAGS(argv)
      if len(rest) > 1:
        raise flags.Error(f"not understood: {' '.join(rest[1:])}")
      if "config" in flags.FLAGS:
        # A file that did not load raises when it is read.
        list(flags.FLAGS.config)
    except Exception as error:  # A config file is a program: it may raise any.
      said = error.args[-1] if error.args else type(error).__name__
      if isinstance(error, (AttributeError, KeyError)):
        said = f"no such field: {said}"
      given = " ".join(argv[1:])
      print(f"ConfigError: {said} (in: {given})", file=sys.stderr)
      sys.exit(2)
    return rest

  return parse
