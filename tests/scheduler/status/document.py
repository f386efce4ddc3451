"""The page as a parser reads it."""

from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser

from presage.scheduler.status.status_page import page
from presage.scheduler.status.view import View

VOID = {"meta", "link", "br", "img", "input"}


@dataclass
class Document(HTMLParser):
    """Elements of a document, checked for their nesting."""

    open: list[str] = field(default_factory=list)
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]


def parsed(view: View) -> Document:
    document = Document()
    document.feed(page(view))
    document.close()
    assert document.open == []
    return document


def check_usable(document: Document) -> None:
    """Check that a document can be used without sight."""
    ids = [a["id"] for _, a in document.elements if "id" in a]
    assert max(Counter(ids).values()) == 1
    for tag in ("h1", "main", "nav", "header", "footer"):
        assert len(document.all(tag)) == 1
    levels = [int(tag[1]) for tag, _ in document.elements if tag in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in zip([0, *levels], levels, strict=False))
    for section in document.all("section"):
        assert section["aria-labelledby"] in ids
    assert len(document.all("caption")) == len(document.all("table"))
    for _, attributes in document.elements:
        if attributes.get("role") == "region":
            assert attributes["tabindex"] == "0"
            assert attributes["aria-labelledby"] in ids
    for svg in document.all("svg"):
        assert svg.get("aria-hidden") == "true" or (svg["role"] == "img" and svg["aria-label"])
    for link in document.all("a"):
        href = link["href"] or ""
        assert href[1:] in ids if href.startswith("#") else href in ("metrics", "healthz")
