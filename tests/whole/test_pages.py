"""The pages' links, file tree, and figures from the benchmark are right."""

import inspect
import pathlib
import re

import pytest

import checkpointing

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
#: Folders of which the tree names every module, those of inner folders included.
WHOLE = ("loader", "checkpointing", "regrain")
#: Folders of which it names the modules that lie directly in them.
FLAT = ("scripts", "examples")


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


def named_in_tree(text: str) -> list[str]:
    """The paths of all folders and files that the tree names, in its order.

    A line that begins with a name and a slash is a folder. It holds the names of the more deeply
    indented lines below it.
    """
    section = re.search(
        r"^## Where to change what\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    assert section
    named: list[str] = []
    inside: list[tuple[int, str]] = []
    for spaces, line in re.findall(r"^( {4,})(\S.*)$", section[1], re.MULTILINE):
        while inside and inside[-1][0] >= len(spaces):
            inside.pop()
        above = inside[-1][1] if inside else ""
        if folder := re.match(r"\w+/", line):
            above += folder[0]
            inside.append((len(spaces), above))
            named.append(above)
        named += [above + name for name in re.findall(r"(?<![\w/.])\w+\.(?:py|toml|md)\b", line)]
    return named


def faults_of_tree(text: str, root: pathlib.Path) -> list[str]:
    """Modules that the tree leaves out or names twice, and names of absent files and folders."""
    named = named_in_tree(text)
    found = [path for top in WHOLE for path in (root / top).rglob("*.py")]
    found += [path for top in FLAT for path in (root / top).glob("*.py")]
    modules = {str(path.relative_to(root)) for path in found if path.name != "__init__.py"}
    return [
        *(f"{name} is left out" for name in sorted(modules.difference(named))),
        *(f"{name} is named twice" for name in sorted({n for n in named if named.count(n) > 1})),
        *(f"{name} is absent" for name in sorted(set(named)) if not (root / name).exists()),
    ]


def test_the_tree_names_each_module_once_and_no_absent_one() -> None:
    assert {f"{top}/" for top in WHOLE + FLAT} <= set(named_in_tree(CONTRIBUTING))
    assert faults_of_tree(CONTRIBUTING, ROOT) == []


def test_planted_faults_of_the_tree_are_found(tmp_path: pathlib.Path) -> None:
    for name in ("loader/a.py", "loader/sources/b.py", "loader/sources/c.py", "loader/new.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    right = (
        "## Where to change what\n\nText of a.py.\n\n    loader/        the stream\n"
        "      sources/       records: b.py, for all formats,\n"
        "        c.py           and files\n                     of more lines\n"
        "      a.py           the rest; new.py too\n\n## Next\n\n    other/\n"
    )
    assert faults_of_tree(right, tmp_path) == []
    planted = right.replace("        c.py ", "        a.py ").replace("new.py too", "a.py too")
    assert faults_of_tree(planted, tmp_path) == [
        "loader/new.py is left out",
        "loader/sources/c.py is left out",
        "loader/a.py is named twice",
        "loader/sources/a.py is absent",
    ]


# --- tables ---------------------------------------------------------------------------------------


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
