"""README and docs/: links, anchors, paths and homes of rules exist, and README stays a front page."""

import json
import re
from pathlib import Path

import pytest

from ms_varlen.catalogue import catalogue

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?)\s*$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"(?:ms_varlen|ckpt_tools|scripts|recipes|tests|docs)/(?:[\w./-]*(?:/|\.\w+))?")
MOST_LINES = 200


def name_of(page):
    return str(page.relative_to(ROOT))


def prose(page):
    """A page without its fenced blocks, so that a comment in a shell is no heading."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    found = []
    for heading in HEADING.findall(prose(page)):
        text = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        earlier = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{earlier}" if earlier else slug)
    return found


def test_headings_become_the_anchors_of_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b.c`: d, e\n```\n# not this\n```\n## In MindFormers 1.9\n## 数据 data\n## 数据 data\n")
    assert anchors(page) == ["a-bc-d-e", "in-mindformers-19", "数据-data", "数据-data-1"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_an_anchor(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_in_code_marks_exists(page):
    missing = []
    for code in CODE.findall(prose(page)):
        if SOURCE.fullmatch(code) and not (ROOT / code).exists():
            missing.append(code)
    assert not missing


def test_architecture_names_the_home_of_each_rule():
    table = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Where each rule lives")[1]
    homes = re.findall(r"`(\w+)` in `([\w./]+)`", table)
    assert len(homes) > 5
    for name, path in homes:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), (name, path)


def test_the_speeds_that_are_drawn_are_those_that_were_recorded():
    run = json.loads((ROOT / "docs/images/speed.json").read_text(encoding="utf-8"))
    bench = (ROOT / "docs/measurements.md").read_text(encoding="utf-8").split("## Bench")[1].split("\n## ")[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert run["command"] in bench.replace("\n", " ")
    assert run["commit"] in bench
    assert len(run["contenders"]) > 4
    for contender in run["contenders"]:
        speed = f"{contender['value']:,}"
        assert f"| {speed} |" in bench
        assert speed in readme.split(".svg)")[0]


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_a_readme_is_a_front_page(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_each_page_is_linked_from_the_readme():
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in LINK.findall(prose(ROOT / "README.md"))}
    assert not [name_of(page) for page in ROOT.glob("docs/*.md") if "." not in page.stem and page not in linked]


def test_the_chinese_page_of_faults_has_the_entries_of_the_catalogue():
    page = (ROOT / "docs/zh/troubleshooting.md").read_text(encoding="utf-8")
    for code, entry in catalogue("zh").items():
        cells = (f"`{code}` {entry.title}", entry.symptom, entry.cause, entry.remedy)
        assert f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |" in page
