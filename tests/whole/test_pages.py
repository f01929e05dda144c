"""What README and docs/ say of files, of each other and of the benchmark holds."""

import inspect
import pathlib
import re

import pytest

import checkpointing

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
#: Files that the tree need not name.
UNNAMED = {"__init__.py", "py.typed"}


# --- links ----------------------------------------------------------------------------------------


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as they are made where Markdown is shown."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: pathlib.Path) -> list[str]:
    """Links to files and headings that are not there."""
    broken = []
    links = re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text("utf-8")))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    assert broken_links(page) == []


def test_a_planted_link_is_found(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What's `here`?\n[a](gone.md) [b](#gone) [c](#whats-here) [d](page.md#x)\n")
    assert broken_links(page) == ["gone.md", "#gone", "page.md#x"]


def test_the_readme_names_each_page() -> None:
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in README] == []


# --- the file tree --------------------------------------------------------------------------------


def tree(text: str) -> dict[str, str]:
    """The folders of the README's tree, and all that is said of each and of what it holds."""
    (section,) = re.findall(r"^## Where to change what\n\n((?:    .*\n)+)", text, re.MULTILINE)
    parts = re.split(r"^    (\w+)/ ", section, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def faults_of_tree(text: str, root: pathlib.Path) -> list[str]:
    """Modules that the tree leaves out, and files and folders of it that are not there."""
    faults = []
    for folder, said in tree(text).items():
        entries = set(re.findall(r"^      (\w[\w.]*/?)", said, re.MULTILINE))
        named = set(re.findall(r"[\w]+\.(?:py|toml|md)\b", said)) | entries
        paths = {path.name for path in root.joinpath(folder).glob("*.py")} - UNNAMED
        inner = {path.name for path in root.joinpath(folder).rglob("*")}
        if folder != "tests":
            faults += [f"{folder}/{name} is left out" for name in sorted(paths - named)]
        faults += [
            f"{folder}/{n} is not there" for n in sorted(named) if n.rstrip("/") not in inner
        ]
    return faults


def test_the_tree_names_all_modules_and_no_others() -> None:
    assert set(tree(README)) >= {"loader", "checkpointing", "scripts", "configs", "docs", "tests"}
    assert faults_of_tree(README, ROOT) == []


def test_a_planted_fault_of_the_tree_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "loader/sources").mkdir(parents=True)
    (tmp_path / "loader/new.py").touch()
    planted = (
        "## Where to change what\n\n    loader/     x\n      sources/    y\n      old.py    z\n"
    )
    assert faults_of_tree(planted, tmp_path) == [
        "loader/new.py is left out",
        "loader/old.py is not there",
    ]


# --- the speed table ------------------------------------------------------------------------------

#: The README's words for contenders, and BENCHMARKS.md's.
CONTENDERS = {
    "`np.take`, no loader": "numpy take",
    "fancy indexing, no loader": "numpy fancy",
    "this loader, all defaults": "regrain",
    "Grain, a gather of whole batches written by hand": "grain per batch",
    "`torch.utils.data.DataLoader` with `__getitems__`": "torch DataLoader",
    "torchdata `StatefulDataLoader`": "torchdata StatefulDataLoader",
    "SPDL": "SPDL",
    "Hugging Face `datasets`, Arrow format": "Hugging Face datasets",
    "Grain, record by record": "grain per record",
    "MosaicML Streaming": "MosaicML Streaming",
}


def table_below(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, row by row."""
    section = text.split(f"{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
    assert table
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows_below(text: str, heading: str) -> dict[str, list[str]]:
    """The cells of the first table below a heading, by the first of each row."""
    return {first: rest for first, *rest in table_below(text, heading)}


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def wrong_speeds(readme: str, benchmarks: str) -> list[str]:
    """Contenders of which the README says something else than the benchmark's page."""
    (heading,) = re.findall(r"^### records: .*$", benchmarks, re.MULTILINE)
    measured = rows_below(benchmarks, heading)
    wrong = []
    for name, (rate, ratio, *_) in rows_below(readme, "## Speed").items():
        found, found_ratio = measured[CONTENDERS[name]][0:3:2]
        same_rate = abs(number(rate) - number(found)) <= 0.5
        # Three digits of a ratio: of this loader's to itself there is none.
        same_ratio = abs(number(ratio) / number(found_ratio) - 1) <= 0.005 if found_ratio else True
        if not (same_rate and same_ratio):
            wrong.append(name)
    return wrong


def test_the_speed_table_is_the_benchmarks() -> None:
    assert set(rows_below(README, "## Speed")) == set(CONTENDERS)
    assert wrong_speeds(README, (ROOT / "BENCHMARKS.md").read_text("utf-8")) == []


def test_a_planted_speed_is_found() -> None:
    benchmarks = (ROOT / "BENCHMARKS.md").read_text("utf-8")
    planted = README.replace("| SPDL | ", "| SPDL | 9", 1)
    assert wrong_speeds(planted, benchmarks) == ["SPDL"]


# --- the table of shuffles ------------------------------------------------------------------------


def wrong_costs(page: str, benchmarks: str) -> list[str]:
    """Rows of the shuffles' table of time and memory that are not the benchmark's."""
    said = rows_below(page, "## Time and memory")
    blocks = {(row[0], row[1]): row[2] for row in table_below(benchmarks, "### Order: blocks")}
    memory = table_below(benchmarks, "### Order: peak memory of a pass")
    peaks = {(row[0], row[1]): row[3] for row in memory if row[2] == "256"}
    (resumes,) = re.findall(r"^### Resume, by records .*$", benchmarks, re.MULTILINE)
    resume = rows_below(benchmarks, resumes)
    kept = rows_below(benchmarks, "### Order: kept between batches")["1,000,000"]
    kinds = ("feistel", "permutation")
    count = "1,000,000"
    found = {
        f"{n} records: million positions/s in blocks": [blocks[kind, n] for kind in kinds]
        for n in ("60,000", count, "10^12")
    }
    found[f"{count} records: peak memory of a pass in batches of 256, bytes"] = [
        peaks[kind, count] for kind in kinds
    ]
    found[f"{count} records: kept, bytes/record"] = [
        "0",
        " to ".join(f"{float(size):.0f}" for size in kept[1:]),
    ]
    found["a resume to the first batch's IDs, ms"] = [
        f"{resume['regrain: construct, resume'][-2]} at 9 x 10^11 of 10^12 records",
        f"{resume['regrain: construct, resume (permutation)'][-3]} at 10^7 of 12,000,000",
    ]
    assert set(said) == set(found)
    return [name for name, cells in said.items() if cells != found[name]]


def test_the_costs_of_shuffles_are_the_benchmarks() -> None:
    page = (ROOT / "docs/shuffles.md").read_text("utf-8")
    benchmarks = (ROOT / "BENCHMARKS.md").read_text("utf-8")
    assert wrong_costs(page, benchmarks) == []
    planted = page.replace("| 4 to 8 |", "| 4 |")
    assert wrong_costs(planted, benchmarks) == ["1,000,000 records: kept, bytes/record"]


# --- the options of resume ------------------------------------------------------------------------


def test_the_page_on_resume_has_a_row_for_each_option() -> None:
    page = (ROOT / "docs/resume.md").read_text("utf-8")
    cells = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)", cell)]
    options = list(inspect.signature(checkpointing.Checkpoints.resume).parameters)
    assert sorted(named) == sorted(options[1:])
