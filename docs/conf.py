"""The documentation site: `python -m sphinx -W docs build/site` makes build/site/index.html.

Pages are Markdown. API pages and their index are made from the table API and the docstrings, pictures by running the
tutorial. The site links the repository that FANIN_URL or the remote `origin` names, if there is one.
Docstrings are plain text in which `names` are code, indented lines are an example, a table is drawn with bars, and
parameters, results and errors are in numpydoc sections. `read` converts all but the sections, and napoleon those.
In every page a number of a rule or a decision (S12, D7) becomes a link to it, and so does code that is a public name.
"""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


def repository(urls: list[str]) -> str:
    """The repository's page, of the package's project URLs; "" if it has none."""
    return next((url.removeprefix("Source, ") for url in urls if url.startswith("Source, ")), "")


def project_urls() -> list[str]:
    """Those of the installed package; none in a tree that is not installed."""
    try:
        return metadata.metadata("fanin").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return []


project = "fanin"
author = "the authors of fanin"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
release = version = runpy.run_path(str(DOCS.parent / "python/fanin/_version.py"))["__version__"]
myst_heading_anchors = 4
napoleon_google_docstring = False
napoleon_use_rtype = False
html_theme = "pydata_sphinx_theme"
html_title = f"fanin {version}"
html_favicon = "icon.svg"
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": f"fanin {version}"},
    "icon_links": [
        {"name": "Repository", "url": url, "icon": "fa-solid fa-code-branch"}
        for url in [repository(project_urls())]
        if url
    ],
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": [],
    "footer_end": [],
}
html_static_path = ["site.css"]
html_sidebars = {"index": [], "ten-things": [], "tutorial": []}  # these have no pages below them
html_css_files = ["site.css"]
python_maximum_signature_line_length = 80  # a longer signature has a line for each parameter
toc_object_entries_show_parents = "hide"
default_role = "code"
highlight_language = "none"  # of blocks that name no language
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch"]  # fanin.torch can be read without it

#: The API pages: file, title, and of the package the names that the page has, of another module its name.
API = {
    "buffer": (
        "Sums of gradients",
        "InputBuffer add_n Slot Sparse Partial Diagonal add_rows Zero Stats global_norm clip_norm counters Counters"
        " trim",
    ),
    "nodes": ("Nodes, leaves, passes", "Node Leaf backward grad walk order free draw get_include"),
    "streams": (
        "Streams, options, traces",
        "Stream Event stream current_stream devices info set_options trace compare",
    ),
    "sharing": ("Shared memory", "overlap fanin.sharing"),
    "errors": (
        "Errors and warnings",
        "CaptureError DTypeError DeviceError DeviceOutOfMemoryError PeerError RaceError StreamMismatchWarning",
    ),
    "sim": ("Simulated machines", "fanin.sim"),
    "graph": ("Record and replay", "GraphTree fanin.graph"),
    "dist": ("Sums over ranks", "fanin.dist"),
    "tape": ("Differentiable operations", "fanin.tape"),
    "torch": ("With torch", "fanin.torch"),
    "audit": ("Audit of a training loop", "fanin.audit"),
    "analysis": ("What a function writes and shares", "fanin.analysis"),
    "descriptors": ("The meaning of a graph's slots", "fanin.descriptors"),
    "testing": ("Tests of your own code", "fanin.testing"),
}


def api_page(title: str, names: list[str]) -> str:
    """An API page: a directive of autodoc for each name."""
    import fanin

    lines = [f"# {title}", "", "```{eval-rst}"]
    for name in names:
        if name.startswith("fanin."):
            lines += [f".. automodule:: {name}", "   :members:", "   :exclude-members: GraphTree"]
            if name not in ("fanin.tape", "fanin.torch"):  # modules that import what is not theirs
                lines.append("   :imported-members:")
        else:
            kind = "class" if isinstance(getattr(fanin, name), type) else "function"
            lines += [f".. auto{kind}:: fanin.{name}", *(["   :members:"] if kind == "class" else [])]
        lines.append("")
    return "\n".join([*lines, "```", ""])


def summary(o: object) -> str:
    """The first sentence of a docstring, as Markdown."""
    first = " ".join((inspect.getdoc(o) or "").partition("\n\n")[0].split())
    return re.sub(r"(?<![.\s]\w)(\. (?=[A-Z`]).*|:$)", ".", first).replace("*", "\\*")


def members(name: str, o: Any) -> Iterator[tuple[str, Any]]:
    """The public names of a module or a class that its page shows, with what they name."""
    names = getattr(o, "__all__", None) if inspect.ismodule(o) else vars(o)
    for member in names or [k for k, v in vars(o).items() if getattr(v, "__module__", None) == name]:
        value = getattr(o, member)
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, type)):
            yield f"{name}.{member}", value


def api_index() -> str:
    """What the page of the API has below its first words: a list for each page, with a line for each name."""
    from sphinx.ext.autodoc.mock import _MockObject, mock

    import fanin

    _MockObject.__or__ = _MockObject.__ror__ = lambda self, other: self  # `torch.Tensor | None`, without torch
    lines = []
    for file, (title, names) in API.items():
        lines += ["", f"## {title}", "", f"[The whole page](api/{file}.md)", ""]
        for name in names.split():
            if name.startswith("fanin."):
                with mock(autodoc_mock_imports):
                    module = importlib.import_module(name)
                rows = [(name, module), *((n, o) for n, o in members(name, module) if not n.endswith(".GraphTree"))]
            else:
                o = getattr(fanin, name)
                rows = [(f"fanin.{name}", o), *(members(name, o) if isinstance(o, type) else [])]
            lines += [f"- `{n}`: {summary(o)}" for n, o in rows]
    return "\n".join([*lines, ""])


def write(path: Path, text: str) -> None:
    """Write a page if it is new, so that a second build reads only what changed."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def make_pages(app: Any) -> None:
    """Write the API pages and what api.md includes, and run the tutorial in the folder of its pictures."""
    write(DOCS / "api" / "index.txt", api_index())
    for file, (title, names) in API.items():
        write(DOCS / "api" / f"{file}.md", api_page(title, names.split()))
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    (DOCS / "pictures").mkdir(exist_ok=True)
    command = [sys.executable, "-c", "".join(blocks)]
    subprocess.run(command, cwd=DOCS / "pictures", check=True, stdout=subprocess.DEVNULL)


# Links of numbers

#: The pages whose tables or headings give numbers, and the families of each.
NUMBERED = {"rules": "SAWPVELKGHR", "decisions": "D", "graph-trees": "T"}
#: A number in running text: no part of a name, of a figure (A1.5) or of a size (2 MB L2, a cache).
NUMBER = re.compile(r"(?<![\w.#])(?<!\D-)(?<!B )(?<!B of )(D\d{1,3}|[SAWPVELKGHRT]\d{1,2})(?![\w]|\.\d)")


def numbers_in(text: str) -> list[tuple[str, str | None]]:
    """The pieces of a text, each with the number that it is, or None."""
    return [(piece, piece if i % 2 else None) for i, piece in enumerate(NUMBER.split(text)) if piece]


def add_anchors(app: Any, doctree: Any) -> None:
    """Give each row and heading of a rule or a decision an anchor: rules.html#s12, decisions.html#d7."""
    from docutils import nodes
    from sphinx import addnodes

    page = app.env.docname
    found = app.env.fanin_numbers = getattr(app.env, "fanin_numbers", {})
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node["refdomain"] == "py" and node["reftarget"].islower() and "." not in node["reftarget"]:
            node.replace_self(node.children)  # a word of a type, such as "device", which is an attribute's name, too
    for node in doctree.findall(lambda n: page in NUMBERED and isinstance(n, nodes.row | nodes.section)):
        number = NUMBER.match(node[0].astext())
        if number and number[1][0] in NUMBERED[page]:
            node["ids"].append(number[1].lower())
            found[number[1]] = page, number[1].lower()


def public_name(code: str, objects: Any) -> str | None:
    """The public name that is meant by some code: `fanin.grad`, `InputBuffer.add`, `buf.take(out=x)`."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", code)
    name = match[1].replace("buf.", "InputBuffer.", 1) if match else ""
    if "." not in name and not name[:1].isupper():
        return None  # a parameter, as often as a function
    full = f"fanin.{name.removeprefix('fanin.')}"
    if full in objects or full == name:
        return full if full in objects else None
    ends = [n for n in objects if n.endswith(f".{name}")]  # Machine.launch
    return ends[0] if len(ends) == 1 else None


def add_links(app: Any, doctree: Any, page: str) -> None:
    """Make links of numbers in running text, and of code that is a public name."""
    from docutils import nodes
    from sphinx.util import logging

    def link(text: str, to: str, anchor: str, inside: Any) -> Any:
        uri = app.builder.get_relative_uri(page, to) if to != page else ""
        return nodes.reference("", "", inside, internal=True, refuri=f"{uri}#{anchor}", classes=["cited"])

    def free(node: Any) -> bool:
        while node := node.parent:
            if isinstance(node, nodes.reference | nodes.title | nodes.literal | nodes.FixedTextElement | nodes.raw):
                return False
            if node.tagname in ("desc_signature", "toctree", "compact_paragraph"):
                return False
        return True

    numbers, objects = app.env.fanin_numbers, app.env.get_domain("py").objects
    for node in [n for n in doctree.findall(nodes.literal) if free(n)]:
        if name := public_name(node.astext(), objects):
            node.replace_self(link(name, objects[name].docname, objects[name].node_id, node.deepcopy()))
    for node in [n for n in doctree.findall(nodes.Text) if free(n)]:
        pieces = numbers_in(node.astext())
        for _, number in pieces:
            if number and number not in numbers and number[0] in "SAD":
                logging.getLogger(__name__).warning("%s is cited and has no anchor", number, location=node.parent)
        if any(number in numbers for _, number in pieces):
            made = [link(p, *numbers[n], nodes.Text(p)) if n in numbers else nodes.Text(p) for p, n in pieces]
            node.parent.replace(node, made)


# Docstrings

#: Sections whose lines napoleon reads; an example after them is converted again.
SECTIONS = {"Parameters", "Returns", "Raises"}


def ends_section(line: str, after: str) -> bool:
    """Whether a line behind a blank one, in a numpydoc section, is no entry of it: an entry has indented lines."""
    return bool(line.strip()) and not line.startswith(" ") and not after.startswith(" ")


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText: indented lines and tables become literal blocks, and text or an example
    after a numpydoc section a section of its own, because such a section ends at the next one only.
    """
    made: list[str] = []
    shown = example = section = False
    for at, line in enumerate(lines):
        after = lines[at + 1] if at + 1 < len(lines) else ""
        if after.startswith("---"):
            section = line in SECTIONS
        elif section and at and not lines[at - 1].strip() and ends_section(line, after):
            section = False
            made += ["Examples", "--------"] if line.startswith(">>>") else ["Notes", "-----"]
        is_table = line.startswith("|")
        example = line.startswith(">>>") or (example and bool(line.strip()))
        if not line.strip() or example:
            shown = shown and not example
            made.append(line)
        elif not section and (is_table or line.startswith("    ")):
            if not shown:
                made += ["", "::", ""]
            shown = True
            made.append(f"    {line}" if is_table else line)
        else:
            if shown:
                made.append("")
            shown = False
            parts = re.split(r"(`[^`]*`)", line)
            made.append(
                "".join(p if i % 2 else re.sub(r"(?<!\*)\*(?!\*)|\|", r"\\\g<0>", p) for i, p in enumerate(parts))
            )
    return made


def read(app: Any, what: str, name: str, o: Any, options: Any, lines: list[str]) -> None:
    # napoleon takes the first line of an attribute up to a colon for its type: the first line is an empty comment
    lines[:] = [*(["..", ""] if what in ("attribute", "property", "data") else []), *as_restructured(lines)]


def setup(app: Any) -> None:
    app.connect("builder-inited", make_pages)
    app.connect("doctree-read", add_anchors)
    app.connect("doctree-resolved", add_links)
    app.connect("autodoc-process-docstring", read, priority=400)  # before napoleon
