"use strict";
// The forms that reports are made of: cards, facts, tiles, and text with code in it.
const report = (() => {
  const { element } = page;

  const code = (value) => element("code", {}, value);
  // Its aside is words or a node.
  const card = (title, aside, ...content) => {
    const beside = typeof aside === "string" ? element("span", { class: "quiet small" }, aside) : aside;
    const head = element("header", {}, element("h2", {}, title), beside);
    return element("section", { class: "card" }, head, ...content);
  };

  function facts(pairs) {
    const list = element("dl", { class: "facts" });
    for (const [name, value] of pairs) {
      if (value !== null && value !== undefined && value !== "")
        list.append(element("dt", {}, name), element("dd", {}, value));
    }
    return list;
  }

  // What stands between backticks is code.
  const prose = (words) =>
    words === null
      ? null
      : element("span", {}, ...words.split("`").map((part, index) => (index % 2 ? code(part) : part)));

  const tiles = (items) =>
    element(
      "div",
      { class: "tiles" },
      ...items.map(({ label, value, detail }) =>
        element(
          "div",
          { class: "tile" },
          element("div", { class: "label" }, label),
          element("div", { class: "value number" }, value),
          detail ? element("div", { class: "detail" }, detail) : null,
        ),
      ),
    );

  // Puts parts into a place and then draws those that have to be in it: a part is a node, or [node, draw].
  function put(place, parts) {
    const pairs = parts.filter(Boolean).map((part) => [part].flat());
    place.append(...pairs.map(([node]) => node));
    pairs.forEach(([, draw]) => draw && draw());
  }

  // A whole page: its head {brand, title, facts}, its parts, and what it says about itself.
  function show(data, parts) {
    const head = element(
      "div",
      {},
      element("p", { class: "brand" }, data.brand),
      element("h1", {}, data.title),
      element("p", { class: "quiet small" }, data.facts),
    );
    document.getElementById("masthead").append(head, page.themeChoice());
    put(document.getElementById("content"), parts);
    document.getElementById("about").append(...data.about.map((line) => element("p", {}, line)));
    document.documentElement.dataset.ready = "true";
  }

  // The banner that says it in a line: {level, word, text}.
  const verdict = ({ level, word, text }, ...more) =>
    element(
      "div",
      { class: `verdict level-${level}`, role: "status" },
      element("span", { class: "word" }, word),
      element("span", {}, text),
      ...more,
    );

  // The values of a fact: paths as code, several one below the other.
  const fact = ([label, values, form]) => {
    const drawn = values.map(form === "path" ? code : prose);
    const several = form === "list" || drawn.length > 1;
    const whole = several ? element("ul", {}, ...drawn.map((value) => element("li", {}, value))) : drawn[0];
    return [label, form === "fix" ? element("div", { class: "fix" }, whole) : whole];
  };

  // A finding: {level, words, amount} above, its facts below.
  const finding = (item) =>
    element(
      "article",
      { class: `card finding ${item.level}` },
      element(
        "header",
        {},
        element("h3", {}, item.words),
        element("span", { class: "amount number" }, item.amount),
      ),
      facts(item.facts.map(fact)),
    );

  const notes = (title, lines) =>
    lines.length
      ? card(
          title,
          null,
          element("div", { class: "notes" }, ...lines.map((line) => element("p", {}, prose(line)))),
        )
      : null;

  // A patch of an item's color {color, hatched}, for a name in a row (inline) or in a legend (line, area).
  function swatch(item, kind = "inline") {
    const made = element("span", { class: `swatch ${kind}${item.hatched ? " hatched" : ""}` });
    if (!item.hatched)
      made.style[kind === "line" ? "borderTopColor" : "background"] = `var(--${item.color})`;
    if (kind === "area") made.style.borderColor = `var(--${item.hatched ? "stranded" : item.color})`;
    return made;
  }

  // An entry of a legend.
  const key = (item, kind, amount) =>
    element(
      "li",
      {},
      element(
        "span",
        { class: "entry" },
        swatch(item, kind),
        item.name,
        amount ? element("span", { class: "amount number" }, amount) : null,
      ),
    );

  return { card, code, facts, finding, key, notes, prose, put, show, swatch, tiles, verdict };
})();
