"""Writes what the vendor's pages say, without prose: `make facts RELEASE=9.1.0 PAGES="ops-nn=../ops-nn ..."`.

Each of PAGES is a repository of the vendor, as its name and where its clone lies, or a folder with its pages,
then perhaps with the branch: ``ops-nn@master=pages``. A page that the release lacks is taken from the clone's
HEAD. Pages that cannot be read are listed on stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from npugrad._tools.vendor_page import read_page
from npugrad.error_table import PARAM_NULLPTR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad._tools.vendor_page import Parameter, VendorPage

ROOT = Path(__file__).resolve().parents[3]
# "Required inputs", without their names.
_ALL_REQUIRED = re.compile("必选|非可选")
_PAGE = re.compile(r"(?!experimental/).*/aclnn\w+(?<!_en)\.md")


class _Source(NamedTuple):
    """Where a page stands, and its text."""

    repository: str
    path: str
    commit: str
    text: str


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, check=True)
    return done.stdout


def sources(repository: str, folder: Path, release: str, names: re.Pattern[str]) -> Iterator[_Source]:
    """Pages of a repository whose names match, by the clone's branch of the release or its HEAD."""
    if not (folder / ".git").exists() and not (folder / "HEAD").exists():
        for page in folder.rglob("aclnn*.md"):
            if names.fullmatch(page.stem):
                yield _Source(
                    repository, page.relative_to(folder).as_posix(), release, page.read_text("utf-8")
                )
        return
    found = set()
    for ref in (release, "HEAD"):
        commit = _git(folder, "rev-parse", ref).strip()
        for path in _git(folder, "ls-tree", "-r", "--name-only", ref).splitlines():
            name = Path(path).stem
            if _PAGE.fullmatch(path) and names.fullmatch(name) and name not in found:
                found.add(name)
                yield _Source(repository, path, commit, _git(folder, "show", f"{ref}:{path}"))


def _parameter(parameter: Parameter, free: set[str]) -> dict[str, Any]:
    return {
        "c_name": parameter.c_name,
        "type": parameter.kind or "tensor",
        "output": parameter.is_output,
        "optional": parameter.is_optional or parameter.c_name in free,
        "dtypes": parameter.dtypes,
        "ranks": parameter.ranks,
        "formats": parameter.formats,
        "values": parameter.values,
    }


def _free(page: VendorPage) -> set[str]:
    """Inputs that may be null, as the rows on null pointers leave them out where these name others.

    Not the first, the gradient, which some pages forget.
    """
    rows = " ".join(text for section, _, text in page.rows if section.endswith(str(PARAM_NULLPTR)))
    named = re.findall(r"\w+", rows, re.ASCII)
    inputs = [each.c_name for each in page.parameters if each.kind is None and not each.is_output]
    return {*inputs[1:]} - {*named} if {*inputs} & {*named} and not _ALL_REQUIRED.search(rows) else set()


def facts(source: _Source) -> dict[str, Any]:
    """What a page says, as a line of the file; raises ValueError for one that cannot be read."""
    page = read_page(source.text)
    codes = Counter(section.split()[-1] for section, _, _ in page.rows if section != "constraints")
    return {
        "name": page.aclnn_name,
        "repository": source.repository,
        "path": source.path,
        "commit": source.commit,
        "sha256": hashlib.sha256(source.text.encode()).hexdigest(),
        "products": page.products,
        "prototype": page.prototype,
        "params": [_parameter(parameter, _free(page)) for parameter in page.parameters],
        "codes": codes,
        "constraints": sum(section == "constraints" for section, _, _ in page.rows),
        "determinism": page.determinism,
    }


def main() -> None:
    """Writes the file of a release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("release", help="branch of the vendor's repositories, such as 9.1.0")
    parser.add_argument("pages", nargs="+", metavar="REPOSITORY=FOLDER")
    parser.add_argument(
        "--names", default=r"aclnn\w*(Backward|Grad)\w*", help="pattern of the functions' names"
    )
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for repository, _, folder in (pages.partition("=") for pages in arguments.pages):
        name, _, branch = repository.partition("@")
        release = branch or arguments.release
        for source in sources(name, Path(folder), release, re.compile(arguments.names)):
            try:
                found[Path(source.path).stem] = facts(source)
            except ValueError as error:
                print(f"page_facts: {name}/{source.path}: {error}", file=sys.stderr)
    lines = (json.dumps(found[name], separators=(",", ":")) for name in sorted(found))
    target = ROOT / "tests" / "pages" / f"{arguments.release}.jsonl"
    target.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    print(f"{target.relative_to(ROOT)}: {len(found)} pages")


if __name__ == "__main__":
    main()
