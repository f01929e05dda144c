"""Options that several commands share, and the examples and exit codes at the end of each help text.

Nothing that takes time is imported here, so that help and completion come at once.
"""

import dataclasses
import pathlib
import textwrap
from collections.abc import Mapping
from typing import Annotated, Final

import typer

#: The exit code that every command has.
INTERRUPTED: Final = {130: "interrupted by Ctrl-C; what it was writing is not there"}
_HELP_WIDTH: Final = 78


@dataclasses.dataclass(frozen=True)
class About:
    """The end of a command's help text.

    Attributes:
      examples: command lines, and the purpose of each.
      exit_codes: the meaning of each exit code.
    """

    examples: Mapping[str, str]
    exit_codes: Mapping[int, str]

    def epilog(self) -> str:
        """Examples and exit codes as text."""
        lines = ["\b", "Examples:"]
        for example, purpose in self.examples.items():
            lines += [f"  # {purpose}", f"  {example}"]
        lines += ["", "\b", "Exit codes:"]
        for code, meaning in self.exit_codes.items():
            lines += textwrap.wrap(
                meaning, _HELP_WIDTH, initial_indent=f"  {code:3}  ", subsequent_indent=" " * 7
            )
        return "\n".join(lines)


RunDir = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="Directory of the run's checkpoints.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")
]
Source = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="A function without arguments that returns the loader.RecordSource; the module is found "
        "in the current folder too.",
    ),
]
Digits = Annotated[
    bool,
    typer.Option("--digits", help="Scikit-learn's digits, to try it without data of your own."),
]
Data = Annotated[
    pathlib.Path | None,
    typer.Argument(
        metavar="[DATA]", help="A .npz file, or a folder of .npy files: an array for each field."
    ),
]
FingerprintFile = Annotated[
    pathlib.Path, typer.Argument(metavar="FILE", help="JSON file of a fingerprint.")
]
Config = Annotated[
    pathlib.Path, typer.Option(metavar="FILE", help="TOML file with a [pipeline] table.")
]

# Options of the drill, also used by scripts/resume_drill.py.

Kills = Annotated[int, typer.Option(metavar="N", min=1, help="SIGKILLs that must land.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the instants.")]
DrillOut = Annotated[
    pathlib.Path,
    typer.Option(metavar="FOLDER", help="For what the drill leaves; an old drill's is replaced."),
]
Processes = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="How many JAX processes each attempt has, one number after another and over again. They "
        "run on the CPU, unless JAX_PLATFORMS says something else. The run without a kill has one.",
        show_default=False,
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="That the other processes have to end by themselves when one was killed. Those that hang "
        "are killed, and count as a failure.",
    ),
]
Within = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        min=0,
        help="Bound for differences of the final train state's floating-point numbers, as a share of "
        "the largest one in their leaf: sums over all processes may depend on how many there are. 0 "
        "stands for no difference of a bit.",
    ),
]
