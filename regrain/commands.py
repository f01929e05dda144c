"""Every command of `regrain`: what it takes, and what its help says. The work itself is in `jobs`.

Nothing that takes time is imported before a job begins, so that help and completion come at once.
"""

import dataclasses
import importlib.metadata
import pathlib
import textwrap
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import typer

#: Of every command.
INTERRUPTED: Final = {130: "interrupted by Ctrl-C; what it was writing is not there"}
_HELP_WIDTH: Final = 78


@dataclasses.dataclass(frozen=True)
class About:
    """What the help of a command ends with.

    Attributes:
      examples: command lines, and what each of them is for.
      exit_codes: what each of them says.
    """

    examples: Mapping[str, str]
    exit_codes: Mapping[int, str]

    def epilog(self) -> str:
        """Examples and exit codes, as they stand at the end of the help."""
        lines = ["\b", "Examples:"]
        for example, purpose in self.examples.items():
            lines += [f"  # {purpose}", f"  {example}"]
        lines += ["", "\b", "Exit codes:"]
        for code, meaning in self.exit_codes.items():
            lines += textwrap.wrap(
                meaning, _HELP_WIDTH, initial_indent=f"  {code:3}  ", subsequent_indent=" " * 7
            )
        return "\n".join(lines)


_IDENTITY_CODES: Final = {
    2: "wrong use, or the data or the file cannot be read or written",
    **INTERRUPTED,
}

ABOUT: Final[Mapping[str, About]] = {
    "inspect": About(
        {
            "regrain inspect runs/digits": "steps, their health, what they are of, what changed",
            "regrain inspect runs/digits --verify full": "digest every file, as a resume does",
            "regrain inspect runs/digits --step 1200 --leaves": "one step, and each array of its train state",
            "regrain inspect runs/digits --config configs/digits.toml": "would this config resume the run?",
            "regrain inspect runs/digits --stream my_data:make_pipeline": "would this pipeline, data and all?",
            "regrain inspect runs/digits --diff runs/other": "how another run differs, leaves included",
            "regrain inspect runs/digits --json | jq .newest_intact": "for a machine",
        },
        {
            0: "every step that was looked at is intact, and nothing differs that was compared",
            1: "a step is damaged or cannot be read, or something differs that was compared",
            2: "wrong use, or the directory, config or stream cannot be read",
            3: "there is no step, or not the one that was asked for",
            **INTERRUPTED,
        },
    ),
    "drill": About(
        {
            "regrain drill --kills 10 -- python train.py {run_dir}": "kill your script ten times",
            "regrain drill --processes 2,4 -- python train.py {run_dir} {coordinator} {process_count} "
            "{process_index}": "on two and four JAX processes in turn",
        },
        {
            0: "no difference",
            1: "a difference",
            2: "wrong use, the script failed by itself, one of its processes hung when another one was "
            "killed, or fewer kills landed than were asked for",
            **INTERRUPTED,
        },
    ),
    "audit": About(
        {
            "regrain audit --config my.toml --source my_data:my_source --out runs/audit": "your own records",
            "regrain audit --config my.toml --num-records 1000000 --out runs/audit": "IDs alone, without any data",
            "regrain audit --config my.toml --source my_data:my_source --step-log steps.jsonl --out runs/audit": "the batches that a run has logged",
        },
        {
            0: "clean",
            1: "findings",
            2: "wrong use, or something cannot be read or written",
            **INTERRUPTED,
        },
    ),
    "provenance": About(
        {
            "regrain provenance runs/digits --step 1200": "which records were in a step?",
            "regrain provenance runs/digits --id 7": "when did a record come, in each epoch?",
            "regrain provenance runs/digits --row 7 --epochs 3:9": "the same by row, in some epochs",
            "regrain provenance runs/digits": "how far has the run come, and what was changed when?",
        },
        {
            0: "answered",
            1: "the run has no such step, row or ID",
            2: "wrong use, or the run cannot be read or followed",
            **INTERRUPTED,
        },
    ),
    "fingerprint": About(
        {
            "regrain fingerprint save before.json data/": "keep the identity of a folder of .npy files",
            "regrain fingerprint compare before.json data/": "what differs now?",
        },
        {
            0: "done, and for compare no difference",
            1: "compare has found a difference",
            **_IDENTITY_CODES,
        },
    ),
    "fingerprint print": About(
        {
            "regrain fingerprint print data.npz": "a file of arrays, one for each field",
            "regrain fingerprint print --source my_data:my_source": "what a function returns",
        },
        {0: "done", **_IDENTITY_CODES},
    ),
    "fingerprint save": About(
        {
            "regrain fingerprint save before.json data/": "a folder of .npy files, memory-mapped",
        },
        {0: "done", **_IDENTITY_CODES},
    ),
    "fingerprint compare": About(
        {
            "regrain fingerprint compare before.json data/": "is it still the same?",
        },
        {0: "no difference", 1: "a difference", **_IDENTITY_CODES},
    ),
    "convert": About(
        {
            "regrain convert data.npz --out data/": "a file of arrays, as a folder of .npy files",
            "regrain convert data/ --out data.parquet": "the format as the name has it, or --to",
            "regrain convert --source my_data:my_source --out data/": "what a function returns",
        },
        {
            0: "written, and read back as the same",
            1: "what was written reads as something else",
            2: "wrong use, or something cannot be read or written",
            **INTERRUPTED,
        },
    ),
    "plot-order": About(
        {
            "regrain plot-order --config my.toml --num-records 1797 --out order.svg": "the first epoch",
            "regrain plot-order --config my.toml --num-records 1000000 --epoch 0 --epoch 1 --out order.png": "two epochs",
        },
        {
            0: "drawn",
            1: "the figure cannot be written",
            2: "the command or the config is wrong",
            **INTERRUPTED,
        },
    ),
}


def _steps(context: typer.Context) -> list[str]:
    """Numbers of the steps in RUN_DIR, for completion."""
    # While the option has no value yet, the argument is not taken for what it is.
    run_dir = context.params.get("run_dir") or next(iter(context.args), None)
    if run_dir is None:
        return []
    try:
        names = [path.name for path in pathlib.Path(run_dir).iterdir()]
    except OSError:
        return []
    return sorted((name for name in names if name.isascii() and name.isdigit()), key=int)


# What several commands take.

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

# What the drill takes, here and in scripts/resume_drill.py.

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

# Plain help: the same on a terminal, in a pipe and in the docs.
app = typer.Typer(
    name="regrain",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Looks into training runs and their data, checks them, and puts them to the test.\n\n"
    "regrain COMMAND --help tells what a command takes, with examples.",
)
fingerprints = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regrain {importlib.metadata.version('regrain')}")
        raise typer.Exit


@app.callback()
def top(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Nothing: each command does its own work."""


@app.command(
    epilog=ABOUT["inspect"].epilog(),
    short_help="Shows what a run's directory holds, and whether it is intact.",
)
def inspect(
    run_dir: RunDir,
    step: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=0,
            autocompletion=_steps,
            help="Look at this step alone; give it again for more.",
        ),
    ] = None,
    verify: Annotated[
        Literal["manifest", "full"],
        typer.Option(
            help="manifest: read each step's manifest, and compare names and sizes of its other "
            "files. full: digest all of them."
        ),
    ] = "manifest",
    leaves: Annotated[
        bool,
        typer.Option("--leaves", help="List the train state's leaves: shape, dtype, bytes."),
    ] = False,
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Would this config resume the run? Compares a TOML file's [pipeline] table; data, "
            "transform, train state and run_config are not looked at.",
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Would this stream resume the run? A function without arguments that returns the "
            "Pipeline, Mixture or GrainStream. Compares all that a resume does, data and next IDs "
            "included, but for train state and run_config.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --stream: a change that the resume will allow, such as batch_size; give it "
            "again for more.",
        ),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER_RUN",
            help="How does the newest intact step of another run differ? Compares stream, settings, place and "
            "train state, each leaf bit for bit.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows what a run's directory holds: its steps and their health, what they are of, what changed.

    Nothing is written, locked or cleaned up, and a run may be writing meanwhile. A damaged step is a
    row like the others, with the reason. Where something is compared, everything that a resume would
    refuse is told before it is tried.
    """
    from regrain import terminal

    with terminal.running("inspect"):
        from regrain.jobs import inspect as job

        asked = job.Asked(
            steps=tuple(step or ()),
            verify=verify,
            leaves=leaves,
            config=config,
            stream=stream,
            allow=tuple(allow or ()),
            diff=diff,
            as_json=as_json,
        )
        code = job.run(run_dir, asked)
    raise typer.Exit(code)


@app.command(
    epilog=ABOUT["drill"].epilog(), short_help="Kills a training script, resumes it, and compares."
)
def drill(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="The training script to drill, with {run_dir} where it takes the directory of its "
            "checkpoints.",
            show_default=False,
        ),
    ],
    kills: Kills = 6,
    seed: Seed = 0,
    out: DrillOut = pathlib.Path("runs/drill"),
    processes: Processes = None,
    patience: Patience = 120,
    within: Within = 0,
    as_json: Json = False,
) -> None:
    """Kills a training script at random instants, resumes it, and compares it with a run never killed.

    The script must train from the batches of Checkpoints.resume and keep its checkpoints in
    {run_dir}; it needs no change. With --processes it gives {coordinator}, {process_count} and
    {process_index} to jax.distributed.initialize, in this order. The folder of --out gets
    report.json, drill.png, and the output and logs of every attempt.
    """
    from regrain import terminal

    with terminal.running("drill", on_the_cpu=False):
        from regrain.jobs import drill as job

        settings = job.Settings(kills, seed, job.counts_of(processes), patience, within)
        code = job.run(command, out, settings, as_json=as_json)
    raise typer.Exit(code)


@app.command(
    epilog=ABOUT["audit"].epilog(),
    short_help="Audits which records a stream delivers, where and how often.",
)
def audit(
    config: Config,
    out: Annotated[
        pathlib.Path, typer.Option(metavar="FOLDER", help="For audit.json and audit.html.")
    ],
    source: Source = None,
    num_records: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=2**63 - 1,
            help="Audit the IDs of so many row numbers, without any data.",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many, from the first on; by default all of the config."
        ),
    ] = None,
    step_log: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE", help="Audit the batches in a run's step log, as far as it came."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Audits which records a stream delivers, where, how often, and whether they are what they should be.

    The records are those of --source; without it, row numbers, which are their own IDs and hold
    nothing: as many as --num-records says, or num_records in a [dataset] table of the config (whose
    name may also be lesson or digits, for the data of the examples). They are audited as they come
    from the source, before any transform. With --step-log the batches are those that a run wrote to
    its log, the last delivery of each step. Steps beyond the end, steps logged again with another batch,
    positions that are not their step's, and lines in a sequence that no run with stops can have written
    are findings of order.
    """
    from regrain import terminal

    with terminal.running("audit"):
        from regrain.jobs import audit as job

        code = job.run(
            config,
            out,
            source=source,
            num_records=num_records,
            epochs=epochs,
            step_log=step_log,
            as_json=as_json,
        )
    raise typer.Exit(code)


@app.command(
    epilog=ABOUT["provenance"].epilog(),
    short_help="Tells which records a step held, and when a record came.",
)
def provenance(
    run_dir: RunDir,
    step: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Which records were in it? Counted from 0 over all epochs. Give it again for more.",
        ),
    ] = None,
    record_id: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", help="When did the record of this ID come?"),
    ] = None,
    row: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=0, help="As --id, for the record in a row of the source."),
    ] = None,
    epochs: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:END",
            help="For --id and --row: in these epochs, END not included. By default the newest 100.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a run on a mixture: which part is asked about."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="What returns the run's source, for IDs that are no row numbers; of a mixture, that "
            "of the part.",
        ),
    ] = None,
    ahead: Annotated[
        bool,
        typer.Option("--ahead", help="Answer also for steps after the newest checkpoint."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Tells which records a step held, and in which steps a record came, from a run's directory alone.

    Without --step, --id and --row: how far the run has come, and what was changed on the way. It
    needs neither the training script nor the data, and replays nothing. Step N is the one after which
    N + 1 are done.
    """
    from regrain import terminal

    with terminal.running("provenance"):
        from regrain.jobs import provenance as job

        asked = job.Asked(
            steps=tuple(step or ()),
            ids=tuple(record_id or ()),
            rows=tuple(row or ()),
            epochs=epochs,
            part=part,
            source=source,
            ahead=ahead,
        )
        code = job.run(run_dir, asked, as_json=as_json)
    raise typer.Exit(code)


app.add_typer(
    fingerprints,
    name="fingerprint",
    short_help="Prints, saves and compares the identity of a data set.",
    help="Prints, saves and compares the fingerprint of a data set: which fields, and which records, "
    "have changed.\n\nThe first axis of an array is the record; an array named id holds the IDs "
    "(integers or strings), which else are row numbers. Nothing is unpickled. The same fingerprint is "
    "in the manifest of each checkpoint.",
    epilog=ABOUT["fingerprint"].epilog(),
)


@fingerprints.command("print", epilog=ABOUT["fingerprint print"].epilog())
def print_fingerprint(
    data: Data = None, digits: Digits = False, source: Source = None, as_json: Json = False
) -> None:
    """Prints the digest of the data, and its fields."""
    from regrain import terminal

    with terminal.running("fingerprint"):
        from regrain.jobs import fingerprint as job

        code = job.show(job.opened(data, source, digits=digits), as_json=as_json)
    raise typer.Exit(code)


@fingerprints.command("save", epilog=ABOUT["fingerprint save"].epilog())
def save_fingerprint(
    file: FingerprintFile,
    data: Data = None,
    digits: Digits = False,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """Saves the fingerprint of the data in FILE, for compare."""
    from regrain import terminal

    with terminal.running("fingerprint"):
        from regrain.jobs import fingerprint as job

        code = job.save(file, job.opened(data, source, digits=digits), as_json=as_json)
    raise typer.Exit(code)


@fingerprints.command("compare", epilog=ABOUT["fingerprint compare"].epilog())
def compare_fingerprint(
    file: FingerprintFile,
    data: Data = None,
    digits: Digits = False,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """Compares the data with the fingerprint in FILE, and names what differs."""
    from regrain import terminal

    with terminal.running("fingerprint"):
        from regrain.jobs import fingerprint as job

        before = job.loaded(file)
        code = job.compare(file, before, job.opened(data, source, digits=digits), as_json=as_json)
    raise typer.Exit(code)


@app.command(
    epilog=ABOUT["convert"].epilog(),
    short_help="Writes a data set in another format, and compares.",
)
def convert(
    out: Annotated[
        pathlib.Path, typer.Option(metavar="PATH", help="What to write; it must not exist.")
    ],
    data: Annotated[
        pathlib.Path | None,
        typer.Argument(metavar="[DATA]", help="A file, or a folder of files."),
    ] = None,
    to: Annotated[
        Literal["npy", "array_record", "parquet"] | None,
        typer.Option(
            help="The format; by default as the suffix of OUT has it, and npy without one."
        ),
    ] = None,
    digits: Digits = False,
    source: Source = None,
    check: Annotated[
        bool, typer.Option(help="Read both afterwards, and compare all records.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Writes the records of a data set, IDs and all, in another format, and compares what was written.

    DATA is a .npz file, a folder of .npy files, Parquet or ArrayRecord files in a folder or alone, or
    a data set that Hugging Face's save_to_disk has written. An array, column or entry named id holds
    the IDs; without it they are those that the format's source makes by default. Some 16 MiB of
    records are read at a time. What is written is there under its name when it is complete, or not at
    all; a name that is taken is refused.
    """
    from regrain import terminal

    with terminal.running("convert"):
        from regrain.jobs import convert as job

        given = job.opened(data, source, digits=digits)
        code = job.run(given, out, to, check=check, as_json=as_json)
    raise typer.Exit(code)


@app.command(
    "plot-order",
    epilog=ABOUT["plot-order"].epilog(),
    short_help="Draws the order of records in an epoch.",
)
def plot_order(
    config: Config,
    out: Annotated[
        pathlib.Path, typer.Option(metavar="FILE", help="Figure to write: .svg, .png or .pdf.")
    ],
    num_records: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Records in the data; by default num_records in the config's table [dataset].",
        ),
    ] = None,
    epoch: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=0, help="Epoch to draw, counted from 0; give it again for more."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draws the order of records in an epoch: position against ID, with the borders of the batches.

    Up to 10,000 records are points; more are a density, from at most about a million positions. The
    shaded strip is the final batch where it is not full. IDs are row numbers. The same command writes
    the same bytes.
    """
    from regrain import terminal

    with terminal.running("plot-order"):
        from regrain.jobs import plot_order as job

        code = job.run(config, out, num_records, epoch or [0], as_json=as_json)
    raise typer.Exit(code)
