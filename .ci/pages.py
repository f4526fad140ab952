"""Writes the pages of the site to build/docs, for MkDocs and for Zensical, which reads the same mkdocs.yml.

On GitHub, a page under docs/ links to `../CHANGELOG.md`, and CHANGELOG.md links to `docs/own-data.md`. On the
site all of them lie in one folder. The home page is the beginning of README.md, then docs/README.md.
"""

import re
import shutil
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "docs"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
HOME = "index.md"
WIDEST = 88  # columns of a code block
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
LINK = re.compile(r"(\[[^\]]+\])\(([^)#\s]*)(#[^)\s]*)?\)")  # also of pictures


def targets() -> dict[str, str]:
    """Return where each file of the repository lies on the site, by its path."""
    found = {
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs"))
        for path in (ROOT / "docs").rglob("*.*")
    }
    found |= {name: name for name in OUTSIDE}
    for ending in ("md", "png"):
        paths = [str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").rglob(f"*.{ending}")]
        found |= dict(zip(paths, paths, strict=True))
    return found | {"README.md": HOME, "docs/README.md": HOME}


def write() -> None:
    """Write every page and picture anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    places = targets()
    for source, target in places.items():
        file = OUT / target
        file.parent.mkdir(parents=True, exist_ok=True)
        if not source.endswith(".md"):
            shutil.copyfile(ROOT / source, file)
        elif target != HOME:
            hidden = UNSEARCHED if source == "CHANGELOG.md" or source.startswith("benchmarks/") else ""
            file.write_text(hidden + page(source, places))
    first = page("README.md", places).partition("\n## Compared")[0]
    rest = page("docs/README.md", places).partition("\n")[2]
    (OUT / HOME).write_text(f"{first}\n## All pages\n{rest}")


def page(source: str, places: dict[str, str]) -> str:
    """Return the text of a page with links of the site; links to files that are no pages become text."""
    text, up = (ROOT / source).read_text(), "../" * places[source].count("/")
    if source == "docs/compared.md":  # whose table is in README.md
        table = (
            (ROOT / "README.md")
            .read_text()
            .split("## Compared with other tools\n")[1]
            .partition("\nAs of")[0]
        )
        text = text.replace("\n", f"\n{table}", 1)

    def link(match: re.Match[str]) -> str:
        label, path, anchor = match[1], match[2], match[3] or ""
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        if anchor == "#compared-with-other-tools":  # the home page has less of README.md
            return label[1:-1]
        target = places.get(str((ROOT / source).parent.joinpath(path).resolve().relative_to(ROOT)))
        return f"{label}({up}{target}{anchor})" if target else label[1:-1]

    return re.sub(
        r"(?ms)^```sh\n(.*?)^```", lambda block: f"```sh\n{narrow(block[1])}```", LINK.sub(link, text)
    )


def narrow(block: str) -> str:
    """Break the lines of a shell block that are too wide: remarks go above, options below."""
    lines: list[str] = []
    for line in block.splitlines():
        if len(line) > WIDEST and (parts := re.split(r"(?<=\S)\s+# ", line, maxsplit=1))[1:]:
            lines += textwrap.wrap(parts[1], WIDEST, initial_indent="# ", subsequent_indent="# ")
            line = parts[0]
        while len(line) > WIDEST and (at := line.rfind(" --", 4, WIDEST + 1)) > 0:
            lines.append(f"{line[:at]} \\")
            line = f"  {line[at + 1 :]}"
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    write()
