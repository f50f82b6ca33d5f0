"""What of the site does not lie in docs/: pages of other texts, and of the sources that texts link to.

MkDocs calls it (`hooks` in mkdocs.yml). Links in the texts are those of the repository, so that they work on a code
host, too; here they are led to the pages that the site has of the same files. A link to a file that does not exist is
left as it is, and MkDocs ends with an error.
"""

from __future__ import annotations

import configparser
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build"
PAGES = {  # By file of the repository. Those of docs/ have their own.
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
}
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^(`{3,}|~{3,}).*?^\2[ \t]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".json": "json"}
MERMAID = BUILD / "mermaid.min.js"  # `make site` fetches it; without, diagrams stay text.


# Before the plugin that reads the packages: it looks no further for a folder that is not there.
@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Diagrams are drawn if what draws them is here; the packages are put together for the pages of the API."""
    if MERMAID.exists():
        from pymdownx.superfences import fence_code_format

        fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
        fences["custom_fences"] = [{"name": "mermaid", "class": "mermaid", "format": fence_code_format}]
    _lay_out_packages(BUILD / "site-source")
    return config


def _lay_out_packages(folder: Path) -> None:
    """As setup.cfg has them installed: each package of the top level is below chaosnet."""
    shutil.rmtree(folder, ignore_errors=True)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for line in setup["options"]["package_dir"].strip().splitlines():
        package, _, source = (each.strip() for each in line.partition("="))
        target = folder / package.replace(".", "/")
        target.mkdir(parents=True, exist_ok=True)
        for file in (ROOT / source).glob("*.py"):
            shutil.copy(file, target)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each text of the repository, and for each source that one of them links to."""
    texts = {f"docs/{each.src_uri}": each.content_string for each in files.documentation_pages()}
    for path, uri in PAGES.items():
        texts[path] = (ROOT / path).read_text()
        files.append(File.generated(config, uri, content=texts[path]))
    sources = {target for path, text in texts.items() for target in _targets(path, text)}
    for path in sorted(sources):
        if (uri := _page_of(path)) and uri.startswith("source/"):
            files.append(File.generated(config, uri, content=_source_page(path)))
    return files


def _targets(path: str, text: str) -> Iterator[str]:
    """Files and folders of the repository that a text links to."""
    for match in LINK.finditer(CODE.sub("", text)):
        if match[2] and ":" not in match[2]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))


def _page_of(path: str) -> str:
    """The page of the site that shows a file of the repository; "" if there is no such file."""
    place = ROOT / path
    if path in PAGES:
        return PAGES[path]
    if place.is_dir() and f"{path}/README.md" in PAGES:
        return PAGES[f"{path}/README.md"]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if place.is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}.md" if place.is_file() else ""


def _source_page(path: str) -> str:
    """A file, or a list of the files in a folder."""
    place, head = ROOT / path, f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if place.is_dir():
        return head + "\n".join(f"- `{each.name}`" for each in sorted(place.iterdir()) if each.is_file())
    return f"{head}``````{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text()}\n``````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead its links to pages of the site."""
    uri = page.file.src_uri
    path = next((path for path, other in PAGES.items() if other == uri), f"docs/{uri}")
    parts = CODE.split(markdown)  # Text, code, the code's fence, text, ...
    kept = [each for number, each in enumerate(parts) if number % 3 != 2]
    return "".join(
        each if number % 2 else LINK.sub(lambda match: _led(match, path, uri), each)
        for number, each in enumerate(kept)
    )


def _led(match: re.Match[str], path: str, uri: str) -> str:
    target = match[2]
    if not target or ":" in target:
        return match[0]
    found = _page_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
    there = posixpath.relpath(found, posixpath.dirname(uri) or ".") if found else target
    return f"{match[1]}{there}{match[3] or ''}{match[4]}"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Only a page with a diagram loads what draws it, from this site: the theme would ask elsewhere."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{posixpath.relpath("site/mermaid.min.js", posixpath.dirname(page.url) or ".")}"></script>'
    return output.replace("</head>", f"{script}</head>", 1)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Beside the pages."""
    if MERMAID.exists():
        shutil.copy(MERMAID, Path(config.site_dir) / "site" / MERMAID.name)
