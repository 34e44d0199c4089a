"""Measure, in a browser, how well the text of a page differs from what is behind it."""

from dataclasses import dataclass

LOWEST = 4.5  # for text: https://www.w3.org/TR/WCAG22/#contrast-minimum
LOWEST_OF_LINES = 3.0  # for graphics: https://www.w3.org/TR/WCAG22/#non-text-contrast
MEASURE = """selector => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const isSeen = color => color !== "none" && parts(color)[3] !== 0;
  const luminance = color => {
    const linear = parts(color).slice(0, 3).map(part => part / 255).map(
      part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const bars = [...document.querySelectorAll("[data-bar]")];
  const behind = element => {
    const box = element.getBoundingClientRect(), x = (box.left + box.right) / 2;
    const y = (box.top + box.bottom) / 2;
    const bar = element.localName === "text" && bars.find(bar => {
      const { left, right, top, bottom } = bar.getBoundingClientRect();
      return left <= x && x <= right && top <= y && y <= bottom;
    });
    if (bar) return getComputedStyle(bar).fill;
    for (let parent = element; parent; parent = parent.parentElement) {
      const { backgroundColor } = getComputedStyle(parent);
      if (isSeen(backgroundColor)) return backgroundColor;
    }
  };
  const hasText = element => [...element.childNodes].some(
    node => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
  return [...document.body.querySelectorAll(selector || ":not(script, option)")]
    .filter(element => element.checkVisibility() && (selector || hasText(element)))
    .map(element => {
      const style = getComputedStyle(element);
      const color = selector ? style.stroke : element.ownerSVGElement ? style.fill : style.color;
      const background = behind(element);
      const [low, high] = [luminance(color), luminance(background)].sort((a, b) => a - b);
      const text = element.textContent.trim().slice(0, 40), kind = element.localName;
      return { kind, text, color, background, contrast: (high + 0.05) / (low + 0.05) };
    });
}"""


@dataclass(frozen=True)
class Seen:
    """A text or a line, its color, and the color behind it. `contrast` is from 1 to 21."""

    kind: str  # the name of the HTML or SVG element
    text: str
    color: str
    background: str
    contrast: float


def visible_texts(page) -> list[Seen]:
    """Return each visible element with text of its own."""
    return [Seen(**values) for values in page.evaluate(MEASURE, "")]


def visible_lines(page, selector: str) -> list[Seen]:
    """Return each visible element of an SVG picture that matches, with the color of its line."""
    return [Seen(**values) for values in page.evaluate(MEASURE, selector)]


def check_both_themes(page, kinds: set[str]) -> None:
    """Assert that all text is readable in both themes, and that the dark theme is dark.

    `kinds` are the elements that must be among those with text.
    """
    texts = {}
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        texts[theme] = visible_texts(page)
        assert kinds <= {seen.kind for seen in texts[theme]}
        assert [seen for seen in texts[theme] if seen.contrast < LOWEST] == [], theme
        value = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert value == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[theme]
    light, dark = texts["light"], texts["dark"]
    assert [seen.text for seen in light] == [seen.text for seen in dark] and len(light) > 20
    for one, other in zip(light, dark, strict=True):
        if one.background == "rgb(255, 255, 255)":
            assert one.color != other.color and one.background != other.background, one
