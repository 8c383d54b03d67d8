"""``optimum-cli taut compress|validate|shrink``; optimum finds this file by its place."""

import argparse
import sys

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class _Command(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum has no types
    """A command of ``taut`` under the same name, its arguments handed on as they are."""

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        """Take every argument, '--help' included, for taut's own parser."""
        parser.prefix_chars = "\0"
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run(self) -> None:
        """Run it, and exit as it does."""
        from taut_deploy.cli import main

        sys.exit(main([self.COMMAND.name, *self.args.arguments]))


class _Taut(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum has no types
    """The commands under one name."""

    COMMAND = CommandInfo("taut", "compress causal LMs and prove what it cost")
    SUBCOMMANDS = (
        CommandInfo("compress", "'taut compress': a model into a checkpoint", _Command),
        CommandInfo("validate", "'taut validate': compare two models", _Command),
        CommandInfo("shrink", "'taut shrink': the smallest checkpoint a policy passes", _Command),
    )


REGISTER_COMMANDS = [_Taut]
