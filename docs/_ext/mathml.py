"""Write the formulas of the pages as MathML, when the site is built.

A browser shows MathML by itself: the site needs neither JavaScript nor the network for it.
latex2mathml converts; what browsers would set badly in its result is corrected here.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
_SCRIPTS = {"msub", "msup", "msubsup", "munder", "mover", "munderover"}
_LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
_LARGE = set("∑∏") | {"max", "min"}
_RELATIONS = set("=≠<>≤≥∼≈∝∈⊆↦⇒") | {":=", "=:"}
_TIGHT = set("|‖/")
_PRIMES = set("′″‴")
_OPEN, _CLOSE = set("([{⌊⌈"), set(")]}⌋⌉")
_ORDINARY = set("∞∅…")
_THIN = "0.167em"
_SHORT = 16  # signs; so many fit on a line of every screen


def mathml(latex: str, display: bool = False, before: str = "", after: str = "") -> str:
    """Return a formula as MathML.

    Args:
        latex: the formula, without dollar signs.
        display: whether it stands in a line of its own.
        before: what may not be parted from an inline formula that it precedes, such as "(".
        after: what may not be parted from an inline formula that it follows, such as a full stop.

    Returns:
        One `<math>` element for a display formula. An inline formula may be several, with a
        possible line break after each relation: browsers do not break lines inside an element.

    Raises:
        ValueError: if the formula has a command that latex2mathml does not know, or is malformed.
    """
    from latex2mathml.converter import convert

    if latex.count("{") != latex.count("}"):
        raise ValueError(f"this formula has a brace too many or too few: {latex!r}")
    try:
        root = ElementTree.fromstring(convert(latex, display="block" if display else "inline"))
    except Exception as error:
        raise ValueError(f"this formula cannot be converted: {latex!r} ({error})") from error
    unknown = [text for text in root.itertext() if "\\" in text or "&" in text]
    if unknown:
        raise ValueError(f"latex2mathml does not know {unknown} of the formula {latex!r}")
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    row = _corrected(root[0], display)
    items = list(row) if row.tag == "mrow" else [row]
    if display:
        return _element(items, display)
    parts = [_element(part, display) for part in _broken(items)]
    parts[0] = before + parts[0]
    parts[-1] += after
    return "<wbr>".join(f'<span class="unbroken">{part}</span>' for part in parts)


def _element(items: list[Element], display: bool) -> str:
    """Return a `<math>` element of these items."""
    root = Element("math", {"xmlns": _NAMESPACE} | ({"display": "block"} if display else {}))
    row = ElementTree.SubElement(root, "mrow")
    row.extend(items)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _corrected(node: Element, display: bool) -> Element:
    """Return an element and its parts as browsers expect them."""
    children = [_corrected(child, display) for child in node]
    node[:] = children
    text = node.text or ""
    if node.tag == "mo" and (text.isalpha() or text in _ORDINARY):
        node.tag = "mi"  # max, min, ∞: a browser would put the space of a relation around them
        node.attrib.clear()
    elif node.tag == "mi" and text == "~":
        node.tag, node.text = "mo", "∼"
    elif node.tag == "mi" and text and text not in _ORDINARY and not re.match(r"[\w′″‴]", text):
        node.tag = "mo"
    elif node.get("mathvariant", "normal") != "normal":  # the only one that browsers know
        if (text, node.get("mathvariant")) != ("E", "double-struck"):
            raise ValueError(f"a formula cannot have {text!r} in {node.get('mathvariant')!r}")
        node.text = "𝔼"
        node.attrib.clear()
    elif node.tag == "mspace" and node.get("width") == "thinmathspace":
        node.set("width", _THIN)  # browsers no longer know the names of spaces
    elif node.tag == "mi" and re.fullmatch("[Α-Ω]", text):
        node.set("mathvariant", "normal")  # upright, as LaTeX sets capital Greek letters
    if node.tag == "mo" and node.text in _TIGHT:
        node.attrib.update(lspace="0", rspace="0", stretchy="false")
    elif node.tag == "mo" and node.text in _OPEN | _CLOSE and "minsize" not in node.attrib:
        node.set("stretchy", node.get("stretchy", "false"))
    if node.tag in _LIMITS:
        for script in children[1:]:
            for sign in script.iter("mo"):
                sign.attrib.update(lspace="0.05em", rspace="0.05em")
        if children[-1].text in _PRIMES:
            return _primed(node)
    if node.tag in _LIMITS and display and children[0].text in _LARGE:
        node.tag = _LIMITS[node.tag]
    if node.tag == "mrow" and len(children) > 1 and _is_word(children):
        word = Element("mi")
        word.text = "".join(child.text or "" for child in children)
        return word
    if node.tag == "mrow" and len(children) == 1:
        return children[0]
    if node.tag in ("mrow", "mtd"):
        node[:] = _spaced(_signs(children))
    return node


def _primed(node: Element) -> Element:
    """Return a primed symbol with the prime beside it: as a superscript it is hardly seen."""
    base, *between, prime = node
    mark = Element("mo", lspace="0", rspace="0")
    mark.text = prime.text
    row = Element("mrow")
    row.extend([base, mark])
    if not between:
        return row
    indexed = Element("msub")
    indexed.extend([row, *between])
    return indexed


def _signs(items: list[Element]) -> list[Element]:
    """Return items with ":=" and "=:" as one sign, and with signs of one operand marked so."""
    joined: list[Element] = []
    for node in items:
        last = _core(joined[-1]).text if joined else None
        if last is not None and node.text is not None and last + node.text in (":=", "=:"):
            joined[-1].tag, joined[-1].text = "mo", last + node.text
            continue
        if node.text in ("+", "−", "±") and (last == "," or last in _OPEN | _RELATIONS):
            node.set("form", "prefix")
        joined.append(node)
    return joined


def _is_word(items: list[Element]) -> bool:
    """Return whether upright letters stand for one name, as in `\\mathrm{clip}`."""
    upright = all(item.get("mathvariant") == "normal" or item.tag == "mn" for item in items)
    letters = all((item.text or "").isascii() for item in items)
    return upright and letters and items[0].tag == "mi"


def _core(node: Element) -> Element:
    """Return what carries the scripts."""
    while node.tag in _SCRIPTS:
        node = node[0]
    return node


def _is_function(node: Element) -> bool:
    core = _core(node)
    return core.tag == "mi" and (len(core.text or "") > 1 or core.text == "𝔼")


def _spaced(items: list[Element]) -> list[Element]:
    """Return items with thin spaces around names of functions, but for brackets and signs."""
    spaced = items[:1]
    for left, right in zip(items, items[1:], strict=False):
        before, after = _core(left), _core(right)
        if before.tag == "mspace" or after.tag == "mspace" or "mtext" in (before.tag, after.tag):
            needed = False
        elif _is_function(left):
            needed = after.tag != "mo" or after.text in _TIGHT - {"/"}
        elif _is_function(right):
            needed = before.tag != "mo" or before.text in _CLOSE
        else:
            needed = False
        if needed:
            spaced.append(Element("mspace", width=_THIN))
        spaced.append(right)
    return spaced


def _broken(items: list[Element]) -> list[list[Element]]:
    """Return the parts of an inline formula between which a line may end."""
    if _core(items[0]).text in _RELATIONS:
        items[0].set("lspace", "0")
    if len("".join(text for node in items for text in node.itertext())) <= _SHORT:
        return [items]
    parts: list[list[Element]] = [[]]
    depth = 0
    for node in items:
        core = _core(node)
        parts[-1].append(node)
        if core.tag != "mo":
            continue
        depth += (core.text in _OPEN) - (core.text in _CLOSE)
        breaks = core.text in _RELATIONS or core.text in ("+", "−")
        unary = len(parts[-1]) == 1 or core.get("form") == "prefix"
        if depth == 0 and breaks and not unary:
            core.set("form", "infix")
            parts.append([])
    return [part for part in parts if part]


def _attach(app: Any, doctree: Any, name: str) -> None:
    """Move punctuation beside an inline formula to it, so that no line ends between them."""
    from docutils import nodes

    if app.builder.format != "html":
        return

    def moved(pattern: str, at: int) -> str:
        text = node.parent[at] if 0 <= at < len(node.parent) else None
        match = re.search(pattern, text) if isinstance(text, nodes.Text) else None
        if match is None:
            return ""
        node.parent[at] = nodes.Text(text[: match.start()] + text[match.end() :])
        return match[0]

    for node in doctree.findall(nodes.math):
        node["before"] = moved(r"[(\[]+$", node.parent.index(node) - 1)
        node["after"] = moved(r"^[.,;:)\]?]+", node.parent.index(node) + 1)


def _inline(writer: Any, node: Any) -> None:
    _write(writer, node, "span", display=False)


def _block(writer: Any, node: Any) -> None:
    _write(writer, node, "div", display=True)


def _write(writer: Any, node: Any, tag: str, display: bool) -> None:
    from docutils.nodes import SkipNode
    from sphinx.util import logging

    latex, before, after = node.astext(), node.get("before", ""), node.get("after", "")
    try:
        text = mathml(latex, display, before, after)
    except ValueError as error:
        logging.getLogger(__name__).warning(str(error), location=node)
        text = before + writer.encode(latex) + after
    start = writer.starttag(node, tag, "", CLASS="math notranslate nohighlight")
    writer.body.append(f"{start}{text}</{tag}>")
    raise SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Register the renderer; `html_math_renderer = "mathml"` chooses it."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("doctree-resolved", _attach)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
