"""Adds the pages outside docs/ to the site, and makes links between the two work there.

On GitHub, a page under docs/ links to `../CHANGELOG.md`, and CHANGELOG.md links to `docs/own-data.md`. On the
site all of them lie in one folder.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# Links to files that are no pages stay text.
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and the pictures of the benchmarks."""
    paths = [*OUTSIDE, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "benchmarks").rglob("*.md")))]
    pictures = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "benchmarks").rglob("*.png"))]
    for path in [*paths, *pictures]:
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    """Turn links between docs/ and the rest of the repository into links of the site."""
    outside = page.file.src_uri.startswith("benchmarks/") or page.file.src_uri in OUTSIDE
    folder = Path("/") / ("" if outside else "docs") / Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        target = _normal(folder / path)
        if target == "README.md":  # the site has the index of docs/ in its place
            return text
        target = target.removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return match[0] if (ROOT / "docs" / target).exists() else text
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{target}{anchor})"

    if page.file.src_uri == "compared.md":  # whose table is in README.md
        table = (
            (ROOT / "README.md")
            .read_text()
            .split("## Compared with other tools\n")[1]
            .partition("\nAs of")[0]
        )
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n{table}{rest}"
    return LINK.sub(link, markdown)


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts[1:]:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
