"""What can be wrong with how a page looks, found in the browser that shows it.

Each check is a function of JavaScript that returns a list of complaints, empty for a good page.
"""

from __future__ import annotations

from browser.driver import Tab

# Text that is drawn: every text node with a box, its element and its boxes.
_TEXTS = """
function texts() {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim()) continue;
    const element = node.parentElement;
    if (["SCRIPT", "STYLE", "TITLE", "DESC", "title", "desc"].includes(element.tagName)) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter((box) => box.width > 0.5 && box.height > 0.5);
    if (boxes.length) found.push({ node, element, boxes });
  }
  return found;
}
function told(element, text) {
  const name = element.tagName + (element.className.baseVal ?? element.className ? "." : "") +
    (element.className.baseVal ?? element.className);
  return name + " '" + text.trim().slice(0, 60) + "'";
}
// Kept by element: a page has tens of thousands of texts, and styles are slow to ask for.
function kept(find) {
  const known = new Map();
  return (element) => {
    if (!known.has(element)) known.set(element, find(element));
    return known.get(element);
  };
}
const display = kept((one) => getComputedStyle(one).display);
const sideways = kept((one) => {
  const style = getComputedStyle(one);
  if (one === document.body || one === document.documentElement) return "";
  if (["auto", "scroll"].includes(style.overflowX)) return "scrolls";
  return /hidden|clip/.test(style.overflowX + style.overflowY) ? "cuts" : "";
});
const scrolls = kept((one) => {
  if (!one) return false;
  return sideways(one) === "scrolls" || scrolls(one.parentElement);
});
// What cuts an element off: the nearest of these around it.
const cutter = kept((one) => {
  if (!one) return null;
  return sideways(one) === "cuts" ? one : cutter(one.parentElement);
});
// The box that text is laid out in: the nearest that is not inline.
const home = kept((one) => (display(one) === "inline" ? home(one.parentElement) : one));
"""

OVERFLOW = (
    "(() => {"
    + _TEXTS
    + """
  const wrong = [];
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth)
    wrong.push(`the page is ${root.scrollWidth} wide in a window of ${innerWidth}`);
  for (const { node, element, boxes } of texts()) {
    const svg = element.closest("svg");
    const place = (svg ?? home(element)).getBoundingClientRect();
    const edge = svg ? null : cutter(home(element).parentElement)?.getBoundingClientRect();
    for (const one of boxes) {
      if (element.closest(".skip") && one.bottom + scrollY < 0) continue;
      if (!scrolls(element) && (one.right > innerWidth + 1 || one.left < -1))
        wrong.push("leaves the page: " + told(element, node.data));
      else if (one.right > place.right + 1.5 || one.left < place.left - 1.5 ||
               one.bottom > place.bottom + 4 || one.top < place.top - 4)
        wrong.push("leaves its box: " + told(element, node.data));
      else if (edge && (one.right > edge.right + 1 || one.bottom > edge.bottom + 1))
        wrong.push("is cut off: " + told(element, node.data));
    }
  }
  return wrong.slice(0, 20);
})()
"""
)

CONTRAST = (
    "(() => {"
    + _TEXTS
    + """
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  function rgba(colour) {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  }
  function luminance([red, green, blue]) {
    const [r, g, b] = [red, green, blue].map((one) => {
      const part = one / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  const paper = kept((one) => {
    if (!one) return [255, 255, 255, 255];
    const colour = rgba(getComputedStyle(one).backgroundColor);
    return colour[3] === 255 ? colour : paper(one.parentElement);
  });
  const wrong = new Set();
  for (const { node, element } of texts()) {
    if (element.closest("svg")) continue;
    const style = getComputedStyle(element);
    const [ink, back] = [luminance(rgba(style.color)), luminance(paper(element))];
    const ratio = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5))
      wrong.add(`contrast ${ratio.toFixed(2)}: ` + told(element, node.data));
  }
  return [...wrong].slice(0, 20);
})()
"""
)

OVERLAP = """
((selector) => {
  const all = [...document.querySelectorAll(selector)].map((one) => {
    return { one, box: one.getBoundingClientRect() };
  }).filter(({ box }) => box.width > 0);
  const wrong = all.length ? [] : ["nothing is " + selector];
  for (let i = 0; i < all.length; i++)
    for (let j = i + 1; j < all.length; j++) {
      const [a, b] = [all[i].box, all[j].box];
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (width > 1 && height > 1 && !all[i].one.contains(all[j].one))
        wrong.push(`'${all[i].one.textContent}' lies on '${all[j].one.textContent}'`);
    }
  return wrong.slice(0, 20);
})
"""


def overflows(tab: Tab) -> list[str]:
    """Text that leaves the page, its box or the drawing it is in, or is cut off."""
    return list(tab.evaluate(OVERFLOW))


def faint(tab: Tab) -> list[str]:
    """Text with too little contrast to what is behind it: 4.5 to 1, of large text 3 to 1."""
    return list(tab.evaluate(CONTRAST))


def overlaps(tab: Tab, selector: str) -> list[str]:
    """Elements of a kind that lie on one another."""
    return list(tab.evaluate(f"{OVERLAP}({selector!r})"))
